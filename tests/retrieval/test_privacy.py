import os
import stat

import pytest
from rendered import chunks

from blend_retrieval.index import ChunkIndex, update_index


def modes(directory):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}


def assert_private(directory):
    found = modes(directory)
    assert found.pop(directory.name) == 0o700
    assert found
    assert set(found.values()) == {0o600}


def open_to_all(directory):
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)


@pytest.fixture(autouse=True)
def generous():
    before = os.umask(0)
    yield
    os.umask(before)


def test_an_index_is_for_its_owner_alone(tmp_path, bag):
    for texts in ("a", "ab", "abc"):
        update_index(tmp_path / "store" / "index", chunks(*texts), bag)
    assert_private(tmp_path / "store" / "index")


@pytest.mark.parametrize("touch", ["read", "update", "nothing new"])
def test_an_index_of_before_is_closed_when_it_is_opened(tmp_path, bag, touch):
    tmp_path.chmod(0o755)
    index = tmp_path / "index"
    update_index(index, chunks("a"), bag)
    open_to_all(index)
    if touch == "read":
        ChunkIndex.load(index)
    else:
        update_index(index, chunks("b" if touch == "update" else "a"), bag)
    assert_private(index)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_folder_that_holds_other_things_keeps_its_modes(tmp_path, bag):
    (tmp_path / "mine.txt").write_text("x")
    (tmp_path / "mine.txt").chmod(0o644)
    tmp_path.chmod(0o755)
    update_index(tmp_path, chunks("a"), bag)
    ChunkIndex.load(tmp_path)
    found = modes(tmp_path)
    assert (found.pop(tmp_path.name), found.pop("mine.txt")) == (0o755, 0o644)
    assert set(found.values()) == {0o600}


def test_an_index_whose_modes_cannot_be_changed_is_read_all_the_same(tmp_path, bag, monkeypatch):
    update_index(tmp_path, chunks("a"), bag)
    open_to_all(tmp_path)

    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    assert [chunk.text for chunk in ChunkIndex.load(tmp_path).chunks] == ["a"]
    assert update_index(tmp_path, chunks("a", "b"), bag)[:2] == (1, 1)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away")
def test_the_index_of_another_owner_keeps_its_modes(tmp_path, bag):
    update_index(tmp_path, chunks("a"), bag)
    open_to_all(tmp_path)
    for path in (tmp_path, *tmp_path.iterdir()):
        os.chown(path, 12345, 12345)
    ChunkIndex.load(tmp_path)
    assert set(modes(tmp_path).values()) == {0o755, 0o644}
