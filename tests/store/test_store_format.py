"""The files of today's format, byte for byte: an entry that was written once is read by every later version."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from blend.store import open_store
from blend.types import CacheIdentity, ChunkCache

KEY = CacheIdentity("model-a", "float32", (1, 2, 3)).key((1, 2))
CACHE = ChunkCache(
    tuple(torch.arange(2 * 5 * (4 + 2 * index)).reshape(2, 5, -1) / 8 for index in range(3)),
    tuple(-torch.arange(60).reshape(2, 5, 6) / 4 for _ in range(3)),
    start=7,
)
# The first 96 bits of each file's SHA-256, as version 0.1 wrote them.
WRITTEN = {
    ("native", None): {
        "artifacts/map-1": "552f7b78458488ddfe9e6874",
        "namespaces/abc.json": "aa341445f1cfa0ba0723a5e0",
        f"objects/{KEY.namespace}/{KEY.digest[:2]}/{KEY.digest}.safetensors": "97e02b4f7c9efb6298dd9dd8",
        "store.json": "4fbb240b7023449d48f969f0",
    },
    ("bfloat16", b"sixteen bytes at least"): {
        "artifacts/map-1": "3c5d4a228b43bf511a6239f2",
        "namespaces/abc.json": "aa341445f1cfa0ba0723a5e0",
        f"objects/{KEY.namespace}/{KEY.digest[:2]}/{KEY.digest}.safetensors": "43f3377d93c9956b82885df5",
        "sealed": "bd40c574845243a92a940185",
        "store.json": "4fbb240b7023449d48f969f0",
    },
}


# The same of the entry alone, in codecs of few bits, keys without positions.
WRITTEN_STILL = {
    "int8": "0c7f2249d9a3e44d61049de1",
    "int4": "0c19ffd6e75a5021950424f4",
}


@pytest.mark.parametrize("codec", WRITTEN_STILL)
def test_codecs_of_few_bits_write_as_before(tmp_path, codec):
    open_store(tmp_path, codec=codec).put(KEY, replace(CACHE, unrotated=True))
    (path,) = (tmp_path / "objects").rglob("*.safetensors")
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:24] == WRITTEN_STILL[codec]


@pytest.mark.parametrize(("codec", "secret"), WRITTEN)
def test_every_file_is_written_as_before(tmp_path, codec, secret):
    store = open_store(tmp_path, codec=codec, key=secret)
    store.put(KEY, CACHE)
    store.write_artifact("map-1", b"content")
    store.describe("abc", {"model": "tiny", "dtype": "f"})
    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert files.pop(".swapping", None) is None or secret  # a lock of whoever says first that the store is sealed
    assert len(files.pop("generation").read_bytes()) == 32
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest()[:24] for name, path in files.items()} == WRITTEN[
        codec, secret
    ]
