"""The files of today's format, byte for byte: an entry that was written once is read by every later version."""

import hashlib
import json
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
# The first 96 bits of each file's SHA-256, as they are written since blake3.
WRITTEN = {
    ("native", None): {
        "artifacts/map-1": "d1f0583d62ce305f78247329",
        "namespaces/abc.json": "aa341445f1cfa0ba0723a5e0",
        f"objects/{KEY.namespace}/{KEY.digest[:2]}/{KEY.digest}.safetensors": "9fbc516e28bab9b36ffc4ac7",
    },
    ("bfloat16", b"sixteen bytes at least"): {
        "artifacts/map-1": "2428333122ee43fd0e72e6a2",
        "namespaces/abc.json": "aa341445f1cfa0ba0723a5e0",
        f"objects/{KEY.namespace}/{KEY.digest[:2]}/{KEY.digest}.safetensors": "67f4e76b86549baf4f212e4c",
        "sealed": "8137ec16709f4fd4c04ab3a2",
    },
}


# The same of the entry alone, in codecs of few bits, keys without positions.
WRITTEN_SMALL = {"int8": "ddcc89750c9ffca5a732d8b6", "int4": "d04d42fac09be1f8f680221c"}


@pytest.mark.parametrize("codec", WRITTEN_SMALL)
def test_codecs_of_few_bits_write_as_before(tmp_path, codec):
    open_store(tmp_path, codec=codec).put(KEY, replace(CACHE, unrotated=True))
    (path,) = (tmp_path / "objects").rglob("*.safetensors")
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:24] == WRITTEN_SMALL[codec]


# The same with operators; the second of three layers has no KV.
WRITTEN_RECURRENT = {"3": "a332e8cc52030e4d6095caed", "4": "df1e8bb3c51f04bdb7674aad"}


@pytest.mark.parametrize("entry_format", WRITTEN_RECURRENT)
def test_operators_are_written_as_before(tmp_path, entry_format):
    states = tuple(part if index != 1 else part[:0] for index, part in enumerate(CACHE.keys))
    operators = ((), (torch.arange(6.0), torch.ones(2, 2)), (torch.arange(3.0),))
    recurrent = replace(CACHE, keys=states, values=states, lead=2, operators=operators)
    open_store(tmp_path).put(KEY, replace(recurrent, unrotated=entry_format == "4"))
    (path,) = (tmp_path / "objects").rglob("*.safetensors")
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:24] == WRITTEN_RECURRENT[entry_format]


@pytest.mark.parametrize(("codec", "secret"), WRITTEN)
def test_every_file_is_written_as_before(tmp_path, codec, secret):
    store = open_store(tmp_path, codec=codec, key=secret)
    store.put(KEY, CACHE)
    store.write_artifact("map-1", b"content")
    store.describe("abc", {"model": "tiny", "dtype": "f"})
    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert files.pop(".swapping", None) is None or secret  # a lock of whoever says first that the store is sealed
    assert len(files.pop("generation").read_bytes()) == 32
    manifest = json.loads(files.pop("store.json").read_bytes())
    assert len(bytes.fromhex(manifest.pop("id"))) == 16  # tells it from other stores
    assert manifest == {"kind": "kvblend store", "format": 1}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest()[:24] for name, path in files.items()} == WRITTEN[
        codec, secret
    ]
