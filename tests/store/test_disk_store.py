"""The files: layout, manifest, and what happens when they cannot be written, or when something lies in their place."""

import errno
import os
import subprocess
import sys
import time

import pytest
import torch
from reading import assert_holds, cache, descriptors_before, failing, key, open_descriptors, path_of
from safetensors import safe_open
from safetensors.torch import load_file

from blend.errors import EntryDamagedError, StoreError
from blend.files import _HOST
from blend.store import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_safetensors_reader_reads_it(store, dtype):
    put = cache(dtype=dtype)
    store.put(key(1), put)
    tensors = load_file(path_of(store, key(1)))
    assert len(tensors) == 6
    for index in range(3):
        assert torch.equal(tensors[f"{index:03d}.k"], put.keys[index])
        assert torch.equal(tensors[f"{index:03d}.v"], put.values[index])
    with safe_open(path_of(store, key(1)), "pt") as opened:
        assert opened.metadata()["digest"] == key(1).digest


def test_one_layer_is_read_without_the_rest(store, monkeypatch):
    store.put(key(1), cache(layers=8, tokens=100))
    read, preadv = [], os.preadv

    def spy(descriptor, buffers, offset):
        read.append((offset, sum(map(len, buffers))))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    with store.open(key(1)) as reader:
        assert read == []
        keys, values = reader.layer(5)
    assert sum(nbytes for _, nbytes in read) == keys.nbytes + values.nbytes


def test_forgotten_readers_close_their_files(store):
    store.put(key(1), cache())
    before = descriptors_before()
    for _ in range(20):
        store.open(key(1))
    assert open_descriptors() == before


def test_keys_must_be_names(store, tmp_path):
    for namespace, digest in (("..", "ab"), ("ab", "../../x"), ("", "ab"), ("a/b", "ab")):
        with pytest.raises(StoreError, match="hex digests"):
            store.put(type(key(1))(namespace, digest), cache())
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("x")
    for location in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="choose another directory"):
            open_store(location)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("thesis.txt", b"years of work", r"not a store and not empty \(it holds 'thesis.txt'\)"),
        ("store.json", b'{"kind": "kvblend store", "format": 2}', "upgrade kvblend"),
        *(
            ("store.json", content, "damaged or not of kvblend")
            for content in (b"", b"{}", b"{", b"[1]", b"\xff\xfe", b'{"kind": "other", "format": 1}', b"[" * 100_000)
        ),
    ],
)
def test_a_folder_that_is_no_store_or_a_newer_one_is_left_alone(tmp_path, name, content, message):
    tmp_path.chmod(0o755)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_only_abandoned_files_are_swept(tmp_path):
    open_store(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    tmp = tmp_path / "tmp"
    tmp.mkdir(exist_ok=True)
    of_the_dead, old = f".{_HOST}-{dead.pid}-a.tmp", f".{_HOST}-{os.getpid()}-b.tmp"
    staying = {f".{_HOST}-{os.getpid()}-a.tmp", f".00000000-{dead.pid}-a.tmp", ".x.tmp"}
    for name in (of_the_dead, old, *staying):
        (tmp / name).write_text("x")
    os.utime(tmp / old, (time.time() - 7200,) * 2)
    open_store(tmp_path)
    assert {path.name for path in tmp.iterdir()} == staying


@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, "free disk space"), (errno.EROFS, "writable")])
@pytest.mark.parametrize("where", ["os.write", "os.fsync", "pathlib.Path.replace"])
def test_a_failed_write_leaves_the_store_as_it_was(store, monkeypatch, where, code, remedy):
    store.put(key(1), cache(1))
    with monkeypatch.context() as patch:
        patch.setattr(where, failing(code))
        for number in (1, 2):
            with pytest.raises(StoreError, match=remedy):
                store.put(key(number), cache(9))
        with pytest.raises(StoreError, match=remedy):
            store.describe("a", {"model": "x"})
    assert_holds(store, key(1), cache(1))
    assert list(store.keys()) == [key(1)]
    assert list((store.backend.root / "tmp").iterdir()) == []
    assert store.namespaces() == {key(1).namespace: {}}


def folder(path):
    path.mkdir(parents=True)


def loop(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(path.name)


@pytest.mark.parametrize("obstacle", [folder, loop])
def test_an_obstacle_in_a_files_place(store, obstacle):
    store.put(key(2), cache(2))
    root = store.backend.root
    for path in (path_of(store, key(1)), *map(root.joinpath, ("artifacts/map", "generation", "namespaces/abc.json"))):
        obstacle(path)
    with pytest.raises(EntryDamagedError, match="must be computed again"):
        store.open(key(1))
    assert store.held([key(1), key(2)]) == {key(2)}
    with pytest.raises(EntryDamagedError, match=r"map in .* cannot be used"):
        store.read_artifact("map")
    assert store.generation == ""
    assert store.namespaces()["abc"] == {}


def test_a_file_instead_of_a_folder_says_so(store):
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
def test_an_obstacle_instead_of_the_manifest(store, obstacle):
    root = store.backend.root
    (root / "store.json").unlink()
    obstacle(root / "store.json")
    with pytest.raises(StoreError, match="choose another directory"):
        open_store(root)
