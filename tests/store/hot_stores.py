"""What tests of the tier of memory read, and what they compare it with."""

from __future__ import annotations

import torch

from blend.types import ChunkCache

MB = 1 << 20


def settled(store):
    assert store.backend.wait(30)
    return store.memory


def read(store, key):
    """Every layer of an entry, copied; None when there is none."""
    reader = store.open(key)
    if reader is None:
        return None
    with reader:
        return [tuple(part.clone() for part in reader.layer(index)) for index in range(reader.layers)]


def holds(store, key, cache):
    layers = read(store, key)
    pairs = zip(cache.keys, cache.values, strict=True)
    return all(
        torch.equal(a, b) for got, want in zip(layers, pairs, strict=True) for a, b in zip(got, want, strict=True)
    )


def big(number, tokens=512):
    """A cache of 256 KiB for 512 tokens."""
    return ChunkCache(*[(torch.full((1, tokens, 64), float(number)),)] * 2, start=1)
