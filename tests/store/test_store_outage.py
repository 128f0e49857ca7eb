"""A store that cannot be read is an outage and says so; it is never taken for one that holds nothing."""

import errno
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from reading import assert_holds, cache, descriptors_before, failing, key, open_descriptors, path_of

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store import open_store


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "store", budget_bytes=10**6)
    store.put(key(1), cache())
    store.write_artifact("map", b"content")
    store.describe("abc", {"model": "tiny"})
    return store


@pytest.fixture
def root(store):
    return store.backend.root


def reads(store):
    return {
        "open": lambda: store.open(key(1)),
        "contains": lambda: key(2) in store,
        "keys": lambda: list(store.keys()),
        "stats": lambda: store.stats(),
        "namespaces": lambda: store.namespaces(),
        "generation": lambda: store.generation,
        "read_artifact": lambda: store.read_artifact("map"),
        "artifacts": lambda: list(store.artifacts()),
    }


def writes(store):
    return {
        "put": lambda: store.put(key(2), cache()),
        "delete": lambda: store.delete(key(1)),
        "prune": lambda: store.prune((), key(1).namespace),
        "describe": lambda: store.describe("abd", {}),
        "advance": lambda: store.advance(),
        "write_artifact": lambda: store.write_artifact("map", b"new"),
        "delete_artifact": lambda: store.delete_artifact("map"),
        "writing": lambda: store.writing().__enter__(),
    }


def assert_all_raise(calls, message):
    for name, call in calls.items():
        with pytest.raises(StoreError, match=message) as caught:
            call()
        assert not isinstance(caught.value, EntryDamagedError), name
        assert "\n" not in str(caught.value), name


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a file"])
def test_a_store_that_is_gone(store, root, left, tmp_path):
    """Removed, or unmounted: then the folder that it was mounted on is there, and must not fill up."""
    root.rename(tmp_path / "elsewhere")
    if left == "an empty folder":
        root.mkdir()
    elif left == "a file":
        root.write_text("x")
    calls = {**reads(store), **writes(store)}
    assert_all_raise(calls, "is gone.*mount its file system again")
    assert list(root.rglob("*")) == []
    assert root.exists() == (left != "nothing")
    if left == "a file":
        root.unlink()
    (tmp_path / "elsewhere").rename(root)
    for call in calls.values():
        call()


@contextmanager
def descriptors(left):
    """So many descriptors and no more: the limit is on their numbers, of which some below it may be taken."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open("/", os.O_RDONLY) for _ in range(left + 1)]
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_readers_until_there_are_no_more_descriptors(root):
    store = open_store(root)  # readers of memory hold none
    before = descriptors_before()
    with descriptors(8):
        with pytest.raises(StoreError, match="close readers"):
            store.open_many([key(1)] * 9)
        readers = [store.open(key(1)) for _ in range(8)]
        with pytest.raises(StoreError, match="close readers"):
            _ = key(1) in store
        readers.pop().close()
        for _ in range(30):
            assert key(1) in store
            store.open(key(1)).close()
    for reader in readers:
        reader.close()
    assert open_descriptors() == before


def test_every_refusal_closes_its_descriptor(store, root):
    path = path_of(store, key(1))
    raw, before = path.read_bytes(), descriptors_before()
    for content in (b"", raw[:200], raw[:-1], raw.replace(b"F32", b"F64"), b"x" * 300):
        path.write_bytes(content)
        for _ in range(5):
            with pytest.raises(EntryDamagedError):
                store.open(key(1))
    (root / "artifacts" / "map").write_bytes(b"x")
    for _ in range(5):
        with pytest.raises(EntryDamagedError):
            store.read_artifact("map")
    assert open_descriptors() == before


@pytest.mark.parametrize("failed", ["open", "pread"])
@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        (EntryDamagedError, (errno.EIO, errno.ELOOP, errno.ESTALE)),
        (StoreError, (errno.EACCES, errno.EPERM, errno.ENOMEM)),
        (StoreUnreachableError, (errno.ENOTCONN, errno.ETIMEDOUT)),
    ],
    ids=["damage", "refusal", "outage"],
)
def test_which_errors_are_damage_and_which_are_an_outage(store, monkeypatch, failed, kind, codes):
    looks = {"entry": lambda: store.open(key(1)), "artifact": lambda: store.read_artifact("map")}
    if failed == "pread":
        del looks["artifact"]
    for code in codes:
        monkeypatch.setattr(os, failed, failing(code))
        for look in looks.values():
            with pytest.raises(StoreError) as caught:
                look()
            assert type(caught.value) is kind
        if kind is EntryDamagedError:
            assert key(1) not in store
        else:
            with pytest.raises(kind):
                _ = key(1) in store


def test_an_unreadable_folder_is_no_empty_one(store, monkeypatch):
    monkeypatch.setattr(os, "scandir", failing(errno.EACCES))
    calls = reads(store)
    assert_all_raise({name: calls[name] for name in ("keys", "stats", "namespaces", "artifacts")}, "this user may read")


@contextmanager
def another_user():
    """Whom the files' permissions bind."""
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def test_a_store_that_may_only_be_read(root):
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = shutil.copytree(root, Path(folder) / "store")
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with another_user():
            store = open_store(copy, budget_bytes=10**9)
            assert_holds(store, key(1), cache())
            assert store.read_artifact("map") == b"content"
            remedy = r"cannot be written \(Permission denied\): make the directory writable"
            assert_all_raise(writes(store), remedy)
