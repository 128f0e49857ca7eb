"""Nobody but its owner gets into a store, unless its group was let in on purpose."""

import os
import stat
from contextlib import contextmanager

import pytest
from reading import cache, key

from blend.store import open_store


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def umask(bits):
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


FILLED = {"store.json", "objects", "map", "abc.json", "generation", "tmp", ".writing"}


def fill(store, number=1):
    store.put(key(number), cache())
    store.describe("abc", {"model": "tiny"})
    store.write_artifact("map", b"content")
    with store.writing():
        pass


@pytest.mark.parametrize("bits", [0o000, 0o022, 0o077])
def test_a_new_store_is_its_owners_alone(tmp_path, bits):
    root = tmp_path / "above" / "store"
    with umask(bits):
        fill(open_store(root))
    found = [root, *root.rglob("*")]
    assert {path.name for path in found} >= FILLED
    for path in found:
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_what_is_being_written_is_closed_as_well(tmp_path, monkeypatch):
    store, seen, write = open_store(tmp_path / "store"), [], os.write
    monkeypatch.setattr(os, "write", lambda fd, view: seen.append(os.fstat(fd).st_mode & 0o777) or write(fd, view))
    with umask(0):
        fill(store)
    assert set(seen) == {0o600}


@pytest.mark.parametrize("before", [0o755, 0o775, 0o777, 0o701])
def test_an_open_store_is_closed_when_it_is_opened(tmp_path, before):
    root = tmp_path / "store"
    fill(open_store(root))
    for path in (root, *root.rglob("*")):
        path.chmod(before if path.is_dir() else before & 0o666)
    fill(open_store(root), 2)
    assert mode(root) == 0o700
    for path in root.rglob("*"):
        if path.is_file() and key(1).digest not in path.name and path.name not in ("store.json", ".writing"):
            assert mode(path) == 0o600, path


def test_what_was_closed_on_purpose_or_is_another_users_stays_as_it_is(tmp_path, monkeypatch):
    root = tmp_path / "store"
    fill(open_store(root))
    for chosen in (0o700, 0o750, 0o770, 0o500, 0o710):
        root.chmod(chosen)
        open_store(root)
        assert mode(root) == chosen
    root.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    assert key(1) in open_store(root)
    assert mode(root) == 0o755


@pytest.mark.parametrize(
    ("root_mode", "then", "folder", "file"),
    [(0o2750, 0o2750, 0o2750, 0o640), (0o2775, 0o2770, 0o2770, 0o660), (0o2700, 0o2700, 0o2700, 0o600)],
)
def test_a_group_that_was_let_in_gets_into_everything(tmp_path, root_mode, then, folder, file):
    root = tmp_path / "store"
    open_store(root)
    root.chmod(root_mode)
    with umask(0o077):
        fill(open_store(root))
    assert mode(root) == then
    for path in root.rglob("*"):
        if path.name != "store.json":
            assert mode(path) == (folder if path.is_dir() else file), path
