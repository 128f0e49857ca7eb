from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from blend.errors import ConfigError
from blend.store import codec as codecs
from blend.store import open_store
from blend.store.codec import Codec
from blend.types import ChunkCache


def test_unknown_codec_lists_the_choices(tmp_path):
    with pytest.raises(ConfigError, match=r"'zip'.*native, float32, bfloat16, float16"):
        open_store(tmp_path / "store", codec="zip")
    assert not (tmp_path / "store").exists()


def test_importing_the_package_is_light():
    code = "import sys, blend.store; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


class Int8(Codec):
    """Per-row scales: parts of two dtypes, as codecs to come will have them."""

    name = "int8-test"
    parts = ("k.q", "k.scale", "v.q", "v.scale")

    def encode(self, keys, values):
        encoded = {}
        for name, tensor in (("k", keys), ("v", values)):
            scale = tensor.abs().amax(-1, keepdim=True).float() / 127
            encoded[f"{name}.q"] = (tensor / scale).round().to(torch.int8)
            encoded[f"{name}.scale"] = scale
        return encoded

    def decode(self, parts, dtype):
        keys, values = (parts[f"{n}.q"] * parts[f"{n}.scale"] for n in "kv")
        return keys.to(dtype or torch.float32), values.to(dtype or torch.float32)


@pytest.mark.parametrize("location", ["memory:", "disk"])
def test_a_codec_of_several_dtypes_fits(location, tmp_path, key, monkeypatch):
    monkeypatch.setitem(codecs._CODECS, "int8-test", Int8())
    store = open_store(location if location == "memory:" else tmp_path, codec="int8-test")
    # An odd number of int8 values a layer: the scales of the next layer begin at an odd byte of the file.
    keys, values = torch.randn(3, 3, 5, 7).unbind(), torch.randn(3, 3, 5, 7).unbind()
    store.put(key(1), ChunkCache(keys, values, 0))
    with store.open(key(1)) as reader:
        for index in range(3):
            out = torch.empty(2, 3, 5, 7)
            reader.read_into(index, out[0], out[1])
            for got, direct, want in zip(out, reader.layer(index), (keys[index], values[index]), strict=True):
                assert torch.equal(got, direct)
                assert ((got - want).abs() <= want.abs().amax(-1, keepdim=True) / 250).all()
