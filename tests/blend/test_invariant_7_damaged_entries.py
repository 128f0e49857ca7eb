"""Invariant 7: a damaged, truncated, foreign or half-written entry is never used: detected, reported, recomputed, replaced."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import SELECTORS, cache_chunks, cache_of, make_layout
from dense_reference import assert_close
from models import CORE, build, decoder, tokenizer

from blend.model.decoder import Decoder
from blend.prefill.blender import Blend, Blender
from blend.store import ChunkStore, open_store
from blend.types import ChunkCache, ChunkKey, PromptLayout
from tests.store.reading import flip

Damage = Callable[[Path], None]


def _truncated(keep: float) -> Damage:
    return lambda path: os.truncate(path, int(path.stat().st_size * keep))


def _flipped(where: float) -> Damage:
    return lambda path: flip(path, int(where * (path.stat().st_size - 1)))


def _half_written(path: Path) -> None:
    """The size is right, the second half never reached the disk."""
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2))


DAMAGE: dict[str, Damage] = {
    "empty": _truncated(0),
    "cut inside the header": _truncated(0.02),
    "cut in half": _truncated(0.5),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0") and None,
    "bit flip in the header": _flipped(0.01),
    "bit flip in the first layer": _flipped(0.3),
    "bit flip in the last byte": _flipped(1.0),
    "half written": _half_written,
    "not a cache at all": lambda path: path.write_text("chunk cache") and None,
}


def _path(root: Path, key: ChunkKey) -> Path:
    (path,) = root.rglob(f"{key.digest}*")
    return path


def _assert_same(one: Blend, other: Blend) -> None:
    """Up to the rounding of chunks that were computed in different batches."""
    assert torch.equal(one.selection.rows, other.selection.rows)
    assert_close(one.logits, other.logits)
    for a, b in zip(cache_of(one), cache_of(other), strict=True):
        assert_close(torch.cat(a), torch.cat(b))


def _check_refused(blender: Blender, layout: PromptLayout, intact: Blend, victim: int, problems: int) -> None:
    """The entry of chunk `victim` is unusable: as if it were missing, said so, and whole again after `remember`."""
    chunks = range(len(layout.chunks))
    hit = blender.prefill(layout)
    assert hit.hits == tuple(index != victim for index in chunks)
    assert len(hit.problems) == problems
    assert all("\n" not in line and "entry" in line for line in hit.problems)

    clean = Blender(blender.decoder, open_store("memory:"), blender.config)
    cache_chunks(clean, layout, [index for index in chunks if index != victim])
    _assert_same(hit, clean.prefill(layout))
    rows = set(hit.selection.rows.tolist())
    assert set(range(*layout.chunk_spans[victim])) <= rows

    assert blender.remember(hit) == 1
    again = blender.prefill(layout)
    assert all(again.hits)
    assert again.problems == ()
    _assert_same(again, intact)


def _stored(name: str, folder: Path, layout: PromptLayout) -> tuple[Blender, ChunkStore, Blend]:
    store = open_store(folder / "store")
    blender = cache_chunks(Blender(decoder(name), store, SELECTORS["hkvd"]), layout)
    return blender, store, blender.prefill(layout)


@pytest.mark.parametrize(
    ("name", "kind"), [*(("llama", kind) for kind in DAMAGE), *((name, "half written") for name in CORE)]
)
def test_invariant_7_a_damaged_entry_is_refused_reported_and_replaced(name, kind, tmp_path):
    damage, layout = DAMAGE[kind], make_layout()
    blender, _, intact = _stored(name, tmp_path, layout)
    damage(_path(tmp_path, blender.encoder(layout.prefix).identity.key(layout.chunks[1])))
    _check_refused(blender, layout, intact, victim=1, problems=1)


def _foreign_key(kind: str, layout: PromptLayout) -> ChunkKey:
    """Where somebody else keeps the cache of this chunk, or we that of another one."""
    identity = decoder("llama").identity(layout.prefix)
    if kind == "other tokenizer":
        return identity.key([token + 1 for token in layout.chunks[1]])
    others = {
        "other model": replace(identity, model="0" * 32),
        "other prefix": replace(identity, prefix=(3, 4)),
        "other dtype": replace(identity, dtype="bfloat16"),
    }
    return others[kind].key(layout.chunks[1])


@pytest.mark.parametrize("kind", ["other model", "other prefix", "other dtype", "other tokenizer"])
def test_invariant_7_a_foreign_file_in_its_place_is_refused(kind, tmp_path):
    layout = make_layout()
    blender, store, intact = _stored("llama", tmp_path, layout)
    key, foreign = blender.encoder(layout.prefix).identity.key(layout.chunks[1]), _foreign_key(kind, layout)
    generator = torch.Generator().manual_seed(0)
    shape = (2, len(layout.chunks[1]), 16)
    wrong = [torch.randn(shape, generator=generator) for _ in range(8)]
    store.put(foreign, ChunkCache(tuple(wrong[:4]), tuple(wrong[4:]), len(layout.prefix)))
    _path(tmp_path, foreign).replace(_path(tmp_path, key))
    _check_refused(blender, layout, intact, victim=1, problems=1)


def test_invariant_7_an_entry_of_the_wrong_size_is_refused(tmp_path):
    """Whole and under the right key, but not what the prompt needs."""
    layout = make_layout()
    for wrong in (make_layout(chunks=(20, 12, 1, 12)), None):
        blender, store, intact = _stored("llama", tmp_path / str(wrong is None), layout)
        key = blender.encoder(layout.prefix).identity.key(layout.chunks[1])
        if wrong is None:
            ((_, cache),) = blender.encoder(layout.prefix).encode([layout.chunks[1]])
            store.put(key, ChunkCache(cache.keys[:2], cache.values[:2], cache.start))
        else:
            ((_, cache),) = blender.encoder(layout.prefix).encode([wrong.chunks[1]])
            store.put(key, cache)
        _check_refused(blender, layout, intact, victim=1, problems=1)


def test_invariant_7_a_deleted_entry_is_a_miss_without_a_problem(tmp_path):
    layout = make_layout()
    blender, store, intact = _stored("llama", tmp_path, layout)
    store.delete(blender.encoder(layout.prefix).identity.key(layout.chunks[3]))
    _check_refused(blender, layout, intact, victim=3, problems=0)


def test_invariant_7_a_damaged_duplicate_is_reported_once(tmp_path):
    layout = make_layout(chunks=(9, 5))
    layout = replace(layout, places=(*layout.places, layout.places[0]))
    blender, _, _ = _stored("llama", tmp_path, layout)
    _half_written(_path(tmp_path, blender.encoder(layout.prefix).identity.key(layout.chunks[0])))
    blend = blender.prefill(layout)
    assert blend.hits == (False, True, False)
    assert len(blend.problems) == 1
    assert blender.remember(blend) == 1


def _variants() -> dict[str, Decoder]:
    """Models that differ from tiny llama in one thing that changes KV."""
    changed = build(CORE["llama"])
    changed.model.layers[2].mlp.down_proj.weight[0, 0] += 1e-3
    models = {
        "other weights": build(CORE["llama"], seed=1),
        "one weight": changed,
        "other RoPE base": build(CORE["llama"], rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "other norm epsilon": build(CORE["llama"], rms_norm_eps=1e-3),
        "other dtype": build(CORE["llama"]).double(),
    }
    return {name: Decoder(model, tokenizer(), "llama") for name, model in models.items()}


def test_invariant_7_stores_of_other_models_and_prefixes_are_misses(tmp_path):
    layout = make_layout(chunks=(9, 5))
    _, store, _ = _stored("llama", tmp_path, layout)
    for name, other in _variants().items():
        blend = Blender(other, store).prefill(layout)
        assert blend.hits == (False, False), name
        assert blend.problems == ()
        ids = torch.tensor([layout.token_ids])
        assert_close(blend.logits, other.model(ids).logits[:, -1])
    moved = replace(layout, prefix=(*layout.prefix, 3))
    assert Blender(decoder("llama"), store).prefill(moved).hits == (False, False)


def test_the_same_model_loaded_again_finds_its_entries(tmp_path):
    layout = make_layout(chunks=(9, 5))
    _, store, intact = _stored("llama", tmp_path, layout)
    model = build(CORE["llama"])
    model.config._name_or_path = "elsewhere/llama"
    again = Blender(Decoder(model, tokenizer(), "another name"), store, SELECTORS["hkvd"]).prefill(layout)
    assert all(again.hits)
    _assert_same(again, intact)
