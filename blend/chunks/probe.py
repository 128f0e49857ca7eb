"""Whether two ways of running a model give the same KV: a few tokens' KV in the store, under the model's name, to compare with.

Whoever precomputes leaves the probe; another engine that would use those caches computes the same tokens first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from blend.errors import EntryDamagedError
from blend.model.admission import probe_ids, tolerance

if TYPE_CHECKING:
    from blend.model.decoder import RowDecoder
    from blend.store.base import ChunkStore


def leave_probe(store: ChunkStore, decoder: RowDecoder) -> None:
    """Keep the decoder's probe, unless it is there. Raises `StoreError` when the store cannot be written."""
    name = _name(decoder)
    if _read(store, name) is None:
        store.write_artifact(name, save(_probe(decoder)))


def gives_same_kv(store: ChunkStore, decoder: RowDecoder) -> bool:
    """Whether the store holds a probe under this decoder's name, and the decoder gives the same KV within rounding."""
    held = _read(store, _name(decoder))
    if held is None:
        return False
    mine = _probe(decoder)
    if {name: part.shape for name, part in mine.items()} != {name: part.shape for name, part in held.items()}:
        return False
    # Of entries' greatest difference; here all of a layer's are taken together. Both may round: the coarser dtype counts.
    most = max(tolerance(part.dtype) for some in (mine, held) for part in some.values()) / 5
    return all(bool(_far(part, held[name]) <= most) for name, part in mine.items())


def _far(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, relative to the norm."""
    return float((mine.float() - other.float()).norm() / other.float().norm().clamp_min(1e-6))


def _probe(decoder: RowDecoder) -> dict[str, torch.Tensor]:
    ids = probe_ids(decoder.vocabulary).to(decoder.device)
    cache = decoder.new_cache(ids.shape[1])
    decoder.encode_rows(ids, 0, cache)
    views = [cache.view(index) for index in range(len(decoder.layers))]
    return {
        f"{kind}.{i}": part[0].cpu().contiguous()
        for i, kv in enumerate(views)
        for kind, part in zip("kv", kv, strict=True)
    }


def _read(store: ChunkStore, name: str) -> dict[str, torch.Tensor] | None:
    try:
        content = store.read_artifact(name)
        return load(content) if content is not None else None
    except (EntryDamagedError, SafetensorError):
        return None


def _name(decoder: RowDecoder) -> str:
    return f"probe-{decoder.identity(()).namespace}"
