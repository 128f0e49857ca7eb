"""Invariant 7: a damaged, truncated, foreign or half-written entry is never used: detected, reported, recomputed, replaced."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blends import assert_kv, filled
from cases import SELECTORS, cache_chunks, cache_of, make_layout
from dense_reference import assert_close
from models import CORE, build, decoder, tokenizer

from blend.model.decoder import Decoder
from blend.prefill.blender import Blend, Blender
from blend.store import ChunkStore, open_store
from blend.types import ChunkCache, ChunkKey
from tests.store.reading import flip, path_of

LAYOUT = make_layout()
VICTIM = 1
Damage = Callable[[ChunkStore, ChunkKey], object]


def _written(change: Callable[[bytes], bytes]) -> Damage:
    def write(store: ChunkStore, key: ChunkKey) -> None:
        path = path_of(store, key)
        path.write_bytes(change(path.read_bytes()))

    return write


def _flipped(where: float) -> Damage:
    return lambda store, key: flip(path_of(store, key), int(where * (path_of(store, key).stat().st_size - 1)))


_half_written = _written(lambda raw: raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))


def _foreign(**changes: Any) -> Damage:
    """What somebody else keeps for this chunk, or we for another one."""

    def put(store: ChunkStore, key: ChunkKey) -> None:
        identity = replace(decoder("llama").identity(LAYOUT.prefix), **changes)
        foreign = identity.key(LAYOUT.chunks[VICTIM] if changes else [token + 1 for token in LAYOUT.chunks[VICTIM]])
        layers = torch.randn(8, 2, len(LAYOUT.chunks[VICTIM]), 16, generator=torch.Generator().manual_seed(0))
        store.put(foreign, ChunkCache(tuple(layers[:4]), tuple(layers[4:]), len(LAYOUT.prefix)))
        path_of(store, foreign).replace(path_of(store, key))

    return put


def _of_another_size(rows: int, layers: int) -> Damage:
    """Whole and under the right key, but not what the prompt needs."""

    def put(store: ChunkStore, key: ChunkKey) -> None:
        encoder = Blender(decoder("llama"), store).encoder(LAYOUT.prefix)
        ((_, cache),) = encoder.encode([LAYOUT.chunks[VICTIM][:rows]])
        store.put(key, ChunkCache(cache.keys[:layers], cache.values[:layers], cache.start))

    return put


DAMAGE = {
    "empty": _written(lambda raw: b""),
    "cut inside the header": _written(lambda raw: raw[: len(raw) // 50]),
    "cut in half": _written(lambda raw: raw[: len(raw) // 2]),
    "one byte short": _written(lambda raw: raw[:-1]),
    "one byte more": _written(lambda raw: raw + b"\0"),
    "bit flip in the header": _flipped(0.01),
    "bit flip in the first layer": _flipped(0.3),
    "bit flip in the last byte": _flipped(1.0),
    "half written": _half_written,
    "not a cache at all": _written(lambda raw: b"chunk cache"),
    "other model": _foreign(model="0" * 32),
    "other prefix": _foreign(prefix=(3, 4)),
    "other dtype": _foreign(dtype="bfloat16"),
    "other tokenizer": _foreign(),
    "fewer rows": _of_another_size(12, 4),
    "fewer layers": _of_another_size(13, 2),
}


def _assert_same(one: Blend, other: Blend) -> None:
    """Up to the rounding of chunks that were computed in different batches."""
    assert torch.equal(one.selection.rows, other.selection.rows)
    assert_close(one.logits, other.logits)
    assert_kv(cache_of(one), cache_of(other))


def _check_refused(folder: Path, name: str, damage: Damage, victim: int = VICTIM, problems: int = 1) -> None:
    """The entry of chunk `victim` is unusable: as if it were missing, said so, and whole again after `remember`."""
    blender = filled(decoder(name), LAYOUT, SELECTORS["hkvd"], location=folder)
    intact = blender.prefill(LAYOUT)
    damage(blender.store, blender.encoder(LAYOUT.prefix).identity.key(LAYOUT.chunks[victim]))
    others = [index for index in range(len(LAYOUT.chunks)) if index != victim]
    hit = blender.prefill(LAYOUT)
    assert hit.hits == tuple(index in others for index in range(len(LAYOUT.chunks)))
    assert len(hit.problems) == problems
    assert all("\n" not in line and "entry" in line for line in hit.problems)

    clean = Blender(blender.decoder, open_store("memory:"), blender.config)
    _assert_same(hit, cache_chunks(clean, LAYOUT, others).prefill(LAYOUT))
    assert set(range(*LAYOUT.chunk_spans[victim])) <= set(hit.selection.rows.tolist())

    assert blender.remember(hit) == 1
    again = blender.prefill(LAYOUT)
    assert all(again.hits)
    assert again.problems == ()
    _assert_same(again, intact)


@pytest.mark.parametrize(
    ("name", "kind"), [*(("llama", kind) for kind in DAMAGE), *((name, "half written") for name in CORE)]
)
def test_invariant_7_a_damaged_entry_is_refused_reported_and_replaced(name, kind, tmp_path):
    _check_refused(tmp_path, name, DAMAGE[kind])


def test_invariant_7_a_deleted_entry_is_a_miss_without_a_problem(tmp_path):
    _check_refused(tmp_path, "llama", ChunkStore.delete, victim=3, problems=0)


def test_invariant_7_a_damaged_duplicate_is_reported_once(tmp_path):
    layout = make_layout(chunks=(9, 5))
    layout = replace(layout, places=(*layout.places, layout.places[0]))
    blender = filled(decoder("llama"), layout, location=tmp_path)
    _half_written(blender.store, blender.encoder(layout.prefix).identity.key(layout.chunks[0]))
    blend = blender.prefill(layout)
    assert blend.hits == (False, True, False)
    assert len(blend.problems) == 1
    assert blender.remember(blend) == 1


def _variants() -> dict[str, Any]:
    """Models that differ from tiny llama in one thing that changes KV."""
    changed = build(CORE["llama"])
    changed.model.layers[2].mlp.down_proj.weight[0, 0] += 1e-3
    return {
        "other weights": build(CORE["llama"], seed=1),
        "one weight": changed,
        "other RoPE base": build(CORE["llama"], rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "other norm epsilon": build(CORE["llama"], rms_norm_eps=1e-3),
        "other dtype": build(CORE["llama"]).double(),
    }


def test_invariant_7_stores_of_other_models_and_prefixes_are_misses(tmp_path):
    layout = make_layout(chunks=(9, 5))
    store = filled(decoder("llama"), layout, location=tmp_path).store
    for name, model in _variants().items():
        blend = Blender(Decoder(model, tokenizer(), "llama"), store).prefill(layout)
        assert blend.hits == (False, False), name
        assert blend.problems == ()
        assert_close(blend.logits, model(torch.tensor([layout.token_ids])).logits[:, -1])
    moved = replace(layout, prefix=(*layout.prefix, 3))
    assert Blender(decoder("llama"), store).prefill(moved).hits == (False, False)


def test_the_same_model_loaded_again_finds_its_entries(tmp_path):
    blender = filled(decoder("llama"), LAYOUT, SELECTORS["hkvd"], location=tmp_path)
    model = build(CORE["llama"])
    model.config._name_or_path = "elsewhere/llama"
    again = Blender(Decoder(model, tokenizer(), "another name"), blender.store, blender.config).prefill(LAYOUT)
    assert all(again.hits)
    _assert_same(again, blender.prefill(LAYOUT))
