"""The one writer of files: whole or not at all, for whom it is told, and nothing left behind."""

import os
import stat
from collections.abc import Iterator

import pytest

from blend.files import check_creatable, write_atomically


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o026)
    yield
    os.umask(before)


@pytest.mark.parametrize(("mode", "found"), [(0o600, 0o600), (0o660, 0o660), (None, 0o640)])
@pytest.mark.usefixtures("umask")
def test_permissions_are_those_asked_for_or_the_umasks(tmp_path, mode, found):
    path = tmp_path / "file"
    write_atomically(path, [b"one", memoryview(b" two")], mode=mode)
    assert path.read_bytes() == b"one two"
    assert stat.S_IMODE(path.stat().st_mode) == found


def test_content_that_ends_early_leaves_what_was_there(tmp_path):
    def breaks_off() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, breaks_off())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"old"}


def test_a_folder_in_the_place_stays(tmp_path):
    path, aside = tmp_path / "place", tmp_path / "aside"
    (path / "inside").mkdir(parents=True)
    aside.mkdir()
    for folder in (None, aside):
        with pytest.raises(IsADirectoryError):
            write_atomically(path, [b"new"], folder)
    assert set(tmp_path.rglob("*")) == {aside, path, path / "inside"}


def test_asking_whether_a_file_can_be_made_makes_none(tmp_path):
    check_creatable(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file"):
        check_creatable(tmp_path / "missing")
