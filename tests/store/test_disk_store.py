"""The files: layout, manifest, and what happens when they cannot be written."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forging import header_of
from reading import descriptors_before, open_descriptors
from safetensors import safe_open
from safetensors.torch import load_file

from blend.errors import StoreError
from blend.store import open_store


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def test_layers_lie_one_after_another(tmp_path, key, cache):
    put = cache(layers=12)
    open_store(tmp_path).put(key(1), put)
    (path,) = files(tmp_path)
    assert path == tmp_path / "objects" / key(1).namespace / key(1).digest[:2] / f"{key(1).digest}.safetensors"
    header = header_of(path.read_bytes())
    meta = header.pop("__metadata__")
    by_offset = sorted(header, key=lambda name: header[name]["data_offsets"])
    assert by_offset == [f"{index:03d}.{part}" for index in range(12) for part in "kv"]
    ends = [header[name]["data_offsets"] for name in by_offset]
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert (len(path.read_bytes()) - ends[-1][1]) % 64 == 0
    assert (meta["codec"], meta["dtype"], meta["start"], meta["tokens"], meta["layers"]) == (
        "native",
        "F32",
        "7",
        "5",
        "12",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_safetensors_reader_reads_it(tmp_path, key, cache, dtype):
    put = cache(dtype=dtype)
    open_store(tmp_path).put(key(1), put)
    tensors = load_file(files(tmp_path)[0])
    assert len(tensors) == 6
    for index in range(3):
        assert torch.equal(tensors[f"{index:03d}.k"], put.keys[index])
        assert torch.equal(tensors[f"{index:03d}.v"], put.values[index])
    with safe_open(files(tmp_path)[0], "pt") as opened:
        assert opened.metadata()["digest"] == key(1).digest


def test_one_layer_is_read_without_the_rest(tmp_path, key, cache, monkeypatch):
    store = open_store(tmp_path)
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


def test_forgotten_readers_close_their_files(tmp_path, key, cache):
    store = open_store(tmp_path)
    store.put(key(1), cache())
    before = descriptors_before()
    for _ in range(20):
        store.open(key(1))
    assert open_descriptors() == before


def test_keys_must_be_names(tmp_path, key, cache):
    store = open_store(tmp_path / "store")
    for namespace, digest in (("..", "ab"), ("ab", "../../x"), ("", "ab"), ("a/b", "ab")):
        with pytest.raises(StoreError, match="hex digests"):
            store.put(type(key(1))(namespace, digest), cache())
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]


# Opening a directory.


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
    from blend.files import _HOST

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    tmp = tmp_path / "tmp"
    tmp.mkdir(exist_ok=True)
    names = {
        "dead": f".{_HOST}-{dead.pid}-a.tmp",
        "alive": f".{_HOST}-{os.getpid()}-a.tmp",
        "elsewhere": f".00000000-{dead.pid}-a.tmp",
        "old": f".{_HOST}-{os.getpid()}-b.tmp",
        "odd": ".x.tmp",
    }
    for name in names.values():
        (tmp / name).write_text("x")
    os.utime(tmp / names["old"], (time.time() - 7200,) * 2)
    open_store(tmp_path)
    assert {path.name for path in tmp.iterdir()} == {names["alive"], names["elsewhere"], names["odd"]}


# Writing that fails.


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free disk space"), (errno.EROFS, "writable"), (errno.EIO, "writable")]
)
@pytest.mark.parametrize("where", ["os.write", "os.fsync", "pathlib.Path.replace"])
def test_a_failed_write_leaves_the_store_as_it_was(tmp_path, key, cache, monkeypatch, where, code, remedy):
    store = open_store(tmp_path)
    store.put(key(1), cache(1))
    before = {path: path.read_bytes() for path in files(tmp_path)}

    def fail(*args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        for number in (1, 2):
            with pytest.raises(StoreError, match=remedy):
                store.put(key(number), cache(9))
        with pytest.raises(StoreError, match=remedy):
            store.describe("a", {"model": "x"})
    assert {path: path.read_bytes() for path in files(tmp_path)} == before
    assert list((tmp_path / "tmp").iterdir()) == []
    assert store.namespaces() == {key(1).namespace: {}}
