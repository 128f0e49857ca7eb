"""Hits of chunk caches in a tier of memory are those that prompts were told of: nothing else that reads a cache counts."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from cases import cache_chunks, make_layout
from changing import until
from engines import ask
from models import decoder

from blend.config import BlendConfig
from blend.prefill.blender import Blender
from blend.prefill.correction_check import CorrectionCheck
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.store import open_store
from blend.store.admin import verify_entry
from blend.store.backend import cache_name


@pytest.fixture
def blender(tmp_path: Path) -> Blender:
    store = open_store(tmp_path, codec="native", memory_bytes=1 << 26)
    return Blender(decoder("llama"), store, BlendConfig(ratio=0.3))


def counted(blender: Blender) -> int:
    memory = blender.store.memory
    assert memory is not None
    return memory.hits + memory.misses


def test_prompts_that_lacked_the_same_caches_count_what_they_read(blender: Blender) -> None:
    """Each of them has them computed, and what is there by then is verified."""
    with closing(EmbeddedEngine(blender, prefix_budget=0, least_gain=-(10**6))) as engine:
        answers = [ask(engine, make_layout()) for _ in range(12)]
        told = sum(sum(answer.wait().started.hits) for answer in answers)
        until(lambda: not engine.stats().encoding)
        told += sum(ask(engine, make_layout()).wait().started.hits)
    assert counted(blender) == told > 0


def test_what_is_verified_or_calibrated_on_is_no_hit(blender: Blender) -> None:
    layout = make_layout()
    cache_chunks(blender, layout)
    library = blender.library(layout.prefix)
    for variant in library.variants(layout.chunks):
        assert not verify_entry(blender.store, cache_name(library.key(variant)))
    blender.calibrate(layout.prefix, layout.chunks)
    assert counted(blender) == 0


def test_a_second_attempt_is_the_same_prompt(blender: Blender, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout()
    cache_chunks(blender, layout)
    scores = iter(torch.tensor([-1.0, 0.0], dtype=torch.float64))
    monkeypatch.setattr(CorrectionCheck, "score", lambda self: next(scores))
    assert not blender.prefill(layout).correction_fits
    assert counted(blender) == len(layout.chunks)
