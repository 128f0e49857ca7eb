"""The probe of a store: KV of a few fixed tokens, which tells whether two engines compute the same KV.

Who fills a store leaves it there (`leave_probe`). Who reads the store in another dtype or by another engine compares, before
it uses the caches (`take_held_dtype`, `gives_same_kv`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from blend.errors import EntryDamagedError
from blend.model.admission import probe_ids, tolerance
from blend.model.precision import DTYPES

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.model.row_decoder import RowDecoder
    from blend.store.base import ChunkStore


def leave_probe(store: ChunkStore, decoder: RowDecoder) -> None:
    """Keep the decoder's probe, unless it is there. Raises `StoreError` when the store cannot be written."""
    name = _name(decoder, decoder.kept_as)
    if _read(store, name) is None:
        store.write_artifact(name, save(_probe(decoder)))


def take_held_dtype(store: ChunkStore, decoder: Decoder) -> None:
    """Use a store's caches of another dtype, if it has none of the decoder's and a probe shows that they are alike.

    Raises `StoreError` when the store cannot be read; the decoder's own caches are used then.
    """
    native = decoder.kept_as
    if _read(store, _name(decoder, native)) is not None:
        return
    for dtype in DTYPES:
        if dtype != native and gives_same_kv(store, decoder, dtype):
            decoder.kept_as = dtype
            return


def gives_same_kv(store: ChunkStore, decoder: RowDecoder, dtype: str) -> bool:
    """Whether the store has a probe under the decoder's name and `dtype`, and the decoder gives the same KV within rounding."""
    stored = _read(store, _name(decoder, dtype))
    if stored is None:
        return False
    fresh = _probe(decoder)
    if {name: part.shape for name, part in fresh.items()} != {name: part.shape for name, part in stored.items()}:
        return False
    # Of entries' greatest difference; here all of a layer's are taken together. Both may round: the coarser dtype counts.
    dtypes = {part.dtype for part in (*fresh.values(), *stored.values())}
    most = max(map(tolerance, dtypes)) / 5
    return all(_far(part, stored[name]) <= most for name, part in fresh.items())


def _far(fresh: Tensor, stored: Tensor) -> float:
    """The norm of the difference, relative to the norm."""
    expected = stored.float()
    size = expected.norm().clamp_min(1e-6)
    return float((fresh.float() - expected).norm() / size)


def _probe(decoder: RowDecoder) -> dict[str, Tensor]:
    ids = probe_ids(decoder.vocabulary).to(decoder.device)
    cache = decoder.new_cache(ids.shape[1])
    decoder.encode_rows(ids, 0, cache)
    probe = {}
    for index in range(len(cache.layers)):
        keys, values = cache.view(index)
        probe[f"k.{index}"] = keys[0].cpu().contiguous()
        probe[f"v.{index}"] = values[0].cpu().contiguous()
    return probe


def _read(store: ChunkStore, name: str) -> dict[str, Tensor] | None:
    try:
        content = store.read_artifact(name)
        return load(content) if content is not None else None
    except (EntryDamagedError, SafetensorError):
        return None


def _name(decoder: RowDecoder, dtype: str) -> str:
    identity = replace(decoder.identity(()), dtype=dtype)
    return f"probe-{identity.namespace}"
