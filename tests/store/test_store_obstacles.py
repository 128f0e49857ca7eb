"""What lies where a file or folder of the store should be: reading it is damage, writing over it is an error that says so."""

import pytest
from reading import path_of

from blend.errors import EntryDamagedError, StoreError
from blend.store import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


def folder(path):
    path.mkdir(parents=True)


def loop(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(path.name)


@pytest.mark.parametrize("obstacle", [folder, loop])
def test_in_an_entrys_place(store, key, cache, obstacle):
    store.put(key(2), cache(2))
    obstacle(path_of(store, key(1)))
    with pytest.raises(EntryDamagedError, match="must be computed again"):
        store.open(key(1))
    assert store.held([key(1), key(2)]) == {key(2)}


@pytest.mark.parametrize("obstacle", [folder, loop])
def test_in_an_artifacts_place(store, obstacle):
    obstacle(store.backend.root / "artifacts" / "map")
    with pytest.raises(EntryDamagedError, match=r"map in .* cannot be used"):
        store.read_artifact("map")


@pytest.mark.parametrize("obstacle", [folder, loop])
def test_in_a_small_files_place(store, obstacle):
    for name in ("generation", "namespaces/abc.json"):
        obstacle(store.backend.root / name)
    assert store.generation == ""
    assert store.namespaces() == {"abc": {}}


def test_a_file_instead_of_a_folder_says_so(store, key, cache):
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


@pytest.mark.parametrize("obstacle", [folder, loop])
def test_instead_of_the_manifest(tmp_path, obstacle):
    root = tmp_path / "store"
    open_store(root)
    (root / "store.json").unlink()
    obstacle(root / "store.json")
    with pytest.raises(StoreError, match="choose another directory"):
        open_store(root)
