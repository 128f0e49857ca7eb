"""Whatever lies where a file or folder of the store should be: it is damage, and the next write replaces it."""

import os
import socket

import pytest
from reading import assert_holds, enter, path_of

from blend.errors import EntryDamagedError, StoreError
from blend.store import open_store


def folder(path):
    (path / "full").mkdir(parents=True)
    (path / "full" / "of.txt").write_text("things")


def loop(path):
    path.symlink_to(path.name)


def pipe(path):
    os.mkfifo(path)


def door(path):
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name[:60]}")  # the name of a socket is short
    os.close(here)
    (path.parent / path.name[:60]).rename(path)


def link_to_folder(path):
    path.symlink_to(path.parent)


def link_to_nowhere(path):
    path.symlink_to("nowhere")


OBSTACLES = [folder, loop, pipe, door, link_to_folder, link_to_nowhere]


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


def in_the_way(store, path, obstacle):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    obstacle(path)


def assert_tidy(store):
    assert not list((store.backend.root / "tmp").glob("*"))
    assert not list((store.backend.root / "tmp").glob(".*"))


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_at_an_entrys_path(store, key, cache, obstacle):
    store.put(key(2), cache(2))
    in_the_way(store, path_of(store, key(1)), obstacle)
    if obstacle is link_to_nowhere:
        assert store.open(key(1)) is None
    else:
        with pytest.raises(EntryDamagedError, match="must be computed again"):
            store.open(key(1))
    assert store.held([key(1), key(2)]) == {key(2)}
    store.put(key(1), cache())
    assert_holds(store, key(1), cache())
    assert not path_of(store, key(1)).is_symlink()
    assert_tidy(store)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_it_is_deleted_pruned_and_evicted_like_an_entry(store, key, cache, obstacle):
    path = path_of(store, key(1))
    for remove in (lambda: store.delete(key(1)), lambda: store.prune((), key(1).namespace)):
        in_the_way(store, path, obstacle)
        assert set(store.keys()) == {key(1)}
        assert store.stats().entries == 1
        remove()
        assert not os.path.lexists(path)
    store.put(key(3), cache(3))
    budget = int(1.2 * path_of(store, key(3)).stat().st_size)
    in_the_way(store, path, obstacle)
    os.utime(path, (1, 1), follow_symlinks=False)
    open_store(store.backend.root, budget_bytes=budget).put(key(4), cache(4))
    assert set(store.keys()) == {key(4)}
    assert (store.backend.root / "objects" / key(1).namespace).is_dir()
    assert_tidy(store)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_at_an_artifacts_path(store, obstacle):
    path = store.backend.root / "artifacts" / "map"
    in_the_way(store, path, obstacle)
    if obstacle is link_to_nowhere:
        assert store.read_artifact("map") is None
    else:
        with pytest.raises(EntryDamagedError, match=r"map in .* cannot be used"):
            store.read_artifact("map")
    store.write_artifact("map", b"content")
    assert store.read_artifact("map") == b"content"
    assert list(store.artifacts()) == ["map"]
    in_the_way(store, path, obstacle)
    before = store.generation
    store.delete_artifact("map")
    assert store.generation != before
    assert not os.path.lexists(path)
    assert_tidy(store)


# Small files: what is read of something else in their place, and what writes them.
SMALL = {
    "generation": (lambda store: store.generation, "", lambda store: store.advance()),
    "namespaces/abc.json": (
        lambda store: store.namespaces(),
        {"abc": {}},
        lambda store: store.describe("abc", {"a": "b"}),
    ),
    ".writing": (lambda store: None, None, lambda store: enter(store.writing())),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("name", SMALL)
def test_at_a_small_file(store, obstacle, name):
    look, nothing, write = SMALL[name]
    in_the_way(store, store.backend.root / name, obstacle)
    assert look(store) == nothing
    write(store)
    assert (store.backend.root / name).is_file()
    assert name == ".writing" or look(store) != nothing
    assert_tidy(store)


@pytest.mark.parametrize("obstacle", [loop, pipe, door])
@pytest.mark.parametrize("level", [1, 2])
def test_where_a_folder_should_be(store, key, cache, obstacle, level):
    path = path_of(store, key(1)).parents[2 - level]
    path.parent.mkdir(parents=True)
    if obstacle is loop:
        path.write_text("a file")
    else:
        obstacle(path)
    assert store.open(key(1)) is None
    assert list(store.keys()) == []
    assert store.stats() == (0, 0)
    store.delete(key(1))
    store.put(key(1), cache())
    assert key(1) in store
    assert set(store.keys()) == {key(1)}


@pytest.mark.parametrize("level", [1, 2])
def test_a_link_to_another_disk_that_is_not_there_is_not_removed(store, key, cache, level):
    path = path_of(store, key(1)).parents[2 - level]
    path.parent.mkdir(parents=True)
    path.symlink_to("/nowhere/at/all")
    with pytest.raises(StoreError, match="in the way"):
        store.put(key(1), cache())
    assert path.is_symlink()


def test_a_file_instead_of_the_stores_own_folders_says_so(store, key, cache):
    calls = {
        "objects": lambda: store.put(key(1), cache()),
        "artifacts": lambda: store.write_artifact("map", b""),
        "namespaces": lambda: store.describe("abc", {}),
        "tmp": lambda: store.advance(),
    }
    for name, call in calls.items():
        (store.backend.root / name).write_text("x")
        with pytest.raises(StoreError, match="in the way"):
            call()
        assert (store.backend.root / name).read_text() == "x"
        (store.backend.root / name).unlink()


@pytest.mark.parametrize("obstacle", [folder, loop, pipe, door])
def test_instead_of_the_manifest(tmp_path, obstacle):
    root = tmp_path / "store"
    open_store(root)
    (root / "store.json").unlink()
    obstacle(root / "store.json")
    with pytest.raises(StoreError, match="choose another directory"):
        open_store(root)


def test_what_is_too_long_is_not_read(store):
    """Files of a size that no store writes, which take no room on the disk."""
    store.write_artifact("map", b"content")
    store.describe("abc", {"model": "tiny"})
    for name in ("artifacts/map", "generation", "namespaces/abc.json"):
        os.truncate(store.backend.root / name, 1 << 42)
    with pytest.raises(EntryDamagedError, match="longer than"):
        store.read_artifact("map")
    assert store.generation == ""
    assert store.namespaces() == {"abc": {}}
    os.truncate(store.backend.root / "store.json", 1 << 42)
    with pytest.raises(StoreError, match="choose another directory"):
        open_store(store.backend.root)
