"""A store that cannot be read is an outage and says so; it is never taken for one that holds nothing."""

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from reading import assert_holds, descriptors_before, enter, open_descriptors, path_of
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
    assert_all_raise({**reads(store, key), **writes(store, key, cache)}, "is gone.*mount it again")
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


def test_too_few_descriptors(store, key, cache):
    for call in (*reads(store, key).values(), *writes(store, key, cache).values()):
        call()  # what is imported at the first call is there
    store.put(key(1), cache())
    store.write_artifact("map", b"content")
    calls = {**reads(store, key), **writes(store, key, cache)}
    for needs_none in ("delete", "delete_artifact"):
        del calls[needs_none]
    before = descriptors_before()
    with descriptors(0):
        assert_all_raise({**calls, "open the store": lambda: open_store(root_of(store))}, "ulimit -n")
    assert open_descriptors() == before
    assert key(1) in store
    assert store.read_artifact("map") == b"content"


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
        (EntryDamagedError, (errno.EIO, errno.ELOOP)),
        (StoreError, (errno.EACCES, errno.EPERM, errno.ENOMEM)),
        (StoreUnreachableError, (errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)),
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
            # Of an open file, a network file system says "stale" when another machine has evicted it.
            check(EntryDamagedError if code == errno.ESTALE else kind, look_up)


def test_an_unreadable_folder_is_no_empty_one(store, key, monkeypatch):
    scandir = os.scandir

    def fail(path="."):
        if str(path).startswith(str(root_of(store))):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    calls = reads(store, key)
    assert_all_raise({name: calls[name] for name in ("keys", "stats", "namespaces", "artifacts")}, "this user may read")


def test_a_file_that_may_not_grow(store, key, cache):
    before, generation = resource.getrlimit(resource.RLIMIT_FSIZE), store.generation
    calls = {
        "put": lambda: store.put(key(1), cache(tokens=2000)),
        "write_artifact": lambda: store.write_artifact("map", bytes(20_000)),
        "describe": lambda: store.describe("abc", {"model": "x" * 20_000}),
    }
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        assert_all_raise(calls, "free disk space")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (store.read_artifact("map"), store.generation) == (b"content", generation)
    assert store.namespaces()["abc"] == {"model": "tiny"}
    assert_holds(store, key(1), cache())
    assert list((root_of(store) / "tmp").iterdir()) == []


OTHER_USER = """
import tempfile
from contextlib import suppress

def become_another():
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)

def chmod(folders, files):
    for path in (*root.rglob("*"), root):
        path.chmod(folders if path.is_dir() else files)

def refused(call, words):
    try:
        call()
    except StoreError as error:
        assert type(error) is StoreError, repr(error)
        assert words in str(error), error
        return
    raise AssertionError(words)

root = Path(tempfile.mkdtemp()) / "store"
root.parent.chmod(0o755)
store = open_store(root)
store.put(key(1), cache(1))
store.write_artifact("map", b"content")
store.describe("abc", {"model": "tiny"})
with store.writing():
    pass
with store.open(key(1)) as reader:
    reader.layer(0)
"""


def test_another_users_store(tmp_path, spawn):
    """One that may be read is read and not written; in one that may not, nothing is missing that should be computed again."""
    work = f"""
    {OTHER_USER.replace(chr(10), chr(10) + "    ")}
    theirs = open_store(root)
    chmod(0o555, 0o444)
    before = {{path: path.lstat().st_mtime_ns for path in root.rglob("*")}}

    def read_only():
        store = open_store(root, budget_bytes=10**9)
        assert key(1) in store and key(2) not in store
        with store.open(key(1)) as reader:
            assert float(reader.layer(2)[1][0, 0, 0]) == 100.0
        assert store.read_artifact("map") == b"content" and store.read_artifact("other") is None
        assert len(store.generation) == 32
        assert list(store.artifacts()) == ["map"] and store.stats().entries == 1
        assert store.namespaces()["abc"] == {{"model": "tiny"}}
        for call in (
            lambda: store.put(key(2), cache(2)),
            lambda: store.put(key(1), cache(2)),
            lambda: store.delete(key(1)),
            lambda: store.advance(),
            lambda: store.write_artifact("map", b"new"),
            lambda: store.delete_artifact("map"),
            lambda: store.describe("abd", {{}}),
            lambda: store.writing().__enter__(),
        ):
            refused(call, "cannot be written (Permission denied): make the directory writable")
        assert before == {{path: path.lstat().st_mtime_ns for path in root.rglob("*")}}

    def closed():
        for call in (
            lambda: theirs.open(key(1)),
            lambda: key(1) in theirs,
            lambda: theirs.read_artifact("map"),
            lambda: theirs.generation,
        ):
            refused(call, "this user may read it")

    def as_another(check):
        child = os.fork()
        if child == 0:
            become_another()
            check()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    as_another(read_only)
    chmod(0o755, 0o000)
    as_another(closed)
    print("done")
    """
    assert finish(spawn(tmp_path, work)) == ["done"]
