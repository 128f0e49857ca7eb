"""A store that cannot be read is an outage and says so; it is never taken for one that holds nothing."""

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from reading import descriptors_before, enter, open_descriptors, path_of
from store_processes import finish

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store import open_store


@pytest.fixture
def store(tmp_path, key, cache):
    """With an entry."""
    store = open_store(tmp_path / "store", budget_bytes=10**6)
    store.put(key(1), cache())
    store.write_artifact("map", b"content")
    store.describe("abc", {"model": "tiny"})
    return store


def root_of(store):
    return Path(store.backend.place)


def reads(store, key):
    """Every way of asking a store, of what it holds and of what it does not."""
    return {
        "open": lambda: store.open(key(1)),
        "open missing": lambda: store.open(key(2)),
        "contains": lambda: key(2) in store,
        "keys": lambda: list(store.keys()),
        "stats": lambda: store.stats(),
        "namespaces": lambda: store.namespaces(),
        "generation": lambda: store.generation,
        "read_artifact": lambda: store.read_artifact("map"),
        "read missing artifact": lambda: store.read_artifact("other"),
        "artifacts": lambda: list(store.artifacts()),
    }


def writes(store, key, cache):
    return {
        "put": lambda: store.put(key(2), cache()),
        "delete": lambda: store.delete(key(1)),
        "prune": lambda: store.prune((), key(1).namespace),
        "describe": lambda: store.describe("abd", {}),
        "advance": lambda: store.advance(),
        "write_artifact": lambda: store.write_artifact("map", b"new"),
        "delete_artifact": lambda: store.delete_artifact("map"),
        "writing": lambda: enter(store.writing()),
    }


def assert_all_raise(calls, message):
    for name, call in calls.items():
        with pytest.raises(StoreError, match=message) as caught:
            call()
        assert not isinstance(caught.value, EntryDamagedError), name
        assert "\n" not in str(caught.value), name


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a file"])
def test_a_store_that_is_gone(store, key, cache, left, tmp_path):
    """Removed, or unmounted: then the folder that it was mounted on is there, and must not fill up."""
    root_of(store).rename(tmp_path / "elsewhere")
    if left == "an empty folder":
        root_of(store).mkdir()
    elif left == "a file":
        root_of(store).write_text("x")
    assert_all_raise({**reads(store, key), **writes(store, key, cache)}, "is gone.*mount its file system again")
    assert list(root_of(store).rglob("*")) == []
    assert root_of(store).exists() == (left != "nothing")
    if left != "nothing":
        root_of(store).unlink() if left == "a file" else root_of(store).rmdir()
    (tmp_path / "elsewhere").rename(root_of(store))
    for call in (*reads(store, key).values(), *writes(store, key, cache).values()):
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


def test_readers_until_there_are_no_more_descriptors(store, key):
    store = open_store(root_of(store))  # readers of memory hold none
    before = descriptors_before()
    with descriptors(8):
        with pytest.raises(StoreError, match="close readers"):
            store.open_many([key(1)] * 9)
        readers = [store.open(key(1)) for _ in range(8)]
        with pytest.raises(StoreError, match="close readers"):
            store.open(key(1))
        with pytest.raises(StoreError, match="close readers"):
            _ = key(1) in store
        readers.pop().close()
        for _ in range(30):
            assert key(1) in store
            with store.open(key(1)) as reader:
                reader.layer(0)
    for reader in readers:
        reader.close()
    assert open_descriptors() == before


def test_every_refusal_closes_its_descriptor(store, key, cache):
    path = path_of(store, key(1))
    raw, before = path.read_bytes(), descriptors_before()
    for content in (b"", raw[:50], raw[:200], raw[:-1], raw.replace(b"F32", b"F64"), b"x" * 300):
        path.write_bytes(content)
        for _ in range(5):
            with pytest.raises(EntryDamagedError):
                store.open(key(1))
    (root_of(store) / "artifacts" / "map").write_bytes(b"x")
    for _ in range(5):
        with pytest.raises(EntryDamagedError):
            store.read_artifact("map")
    for call in (lambda: next(store.keys()), lambda: list(store.artifacts()), store.stats, store.namespaces):
        call()
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        (EntryDamagedError, (errno.EIO, errno.ELOOP, errno.ESTALE)),
        (StoreError, (errno.EACCES, errno.EPERM, errno.ENOMEM)),
        (StoreUnreachableError, (errno.ENOTCONN, errno.ETIMEDOUT)),
    ],
)
def test_which_errors_are_damage_and_which_are_an_outage(store, key, monkeypatch, kind, codes):
    def check(kind, *calls):
        for call in calls:
            with pytest.raises(StoreError) as caught:
                call()
            assert type(caught.value) is kind

    def look_up():
        return store.open(key(1))

    for code in codes:

        def fail(*args, code=code, **kwargs):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            check(kind, look_up, lambda: store.read_artifact("map"))
            if kind is EntryDamagedError:
                assert key(1) not in store
            else:
                check(kind, lambda: key(1) in store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fail)
            check(kind, look_up)


def test_an_unreadable_folder_is_no_empty_one(store, key, monkeypatch):
    scandir = os.scandir

    def fail(path="."):
        if str(path).startswith(str(root_of(store))):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    calls = reads(store, key)
    assert_all_raise({name: calls[name] for name in ("keys", "stats", "namespaces", "artifacts")}, "this user may read")


def test_a_store_that_may_only_be_read(tmp_path, spawn):
    """As another user, whom the files' permissions bind."""
    work = """
    import tempfile
    root = Path(tempfile.mkdtemp()) / "store"
    root.parent.chmod(0o755)
    store = open_store(root)
    store.put(key(1), cache(1))
    store.write_artifact("map", b"content")
    with store.writing():
        pass
    for path in (*root.rglob("*"), root):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with store.open(key(1)) as reader:
        reader.layer(0)  # what is imported at the first call is there
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    store = open_store(root, budget_bytes=10**9)
    assert key(1) in store and key(2) not in store
    with store.open(key(1)) as reader:
        assert float(reader.layer(2)[1][0, 0, 0]) == 100.0
    assert store.read_artifact("map") == b"content" and len(store.generation) == 32
    for call in (
        lambda: store.put(key(2), cache(2)),
        lambda: store.delete(key(1)),
        lambda: store.write_artifact("map", b"new"),
        lambda: store.writing().__enter__(),
    ):
        try:
            call()
        except StoreError as error:
            assert "cannot be written (Permission denied): make the directory writable" in str(error), error
        else:
            raise AssertionError("it was written")
    print("done")
    """
    assert finish(spawn(tmp_path, work)) == ["done"]
