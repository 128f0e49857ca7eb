"""A quality that is asked for, in the engine: the same rows in pieces, beside other prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import cache_chunks, make_layout
from engines import ask
from models import decoder

from blend.blender import Blender
from blend.config import BlendConfig
from blend.eval.quality import Passes
from blend.model.generate import generate
from blend.quality import RATIOS
from blend.serve.scheduler import EmbeddedEngine
from blend.serve.types import Sampling
from blend.store import open_store

ASKED = BlendConfig(quality=0.05)
LAYOUT = make_layout(chunks=(23, 31, 27, 40))


@pytest.mark.parametrize("until", range(len(RATIOS) + 1))
def test_in_pieces_beside_others_it_is_the_same(until: int, tmp_path: Path) -> None:
    blender = Blender(decoder("llama"), open_store(tmp_path / "kv", codec="native"), BlendConfig())
    cache_chunks(blender, LAYOUT)
    blender.calibrations = Passes(until)
    blend = blender.prefill(LAYOUT, config=ASKED)
    expected = list(generate(blender.decoder, blend, LAYOUT.token_ids, max_new_tokens=6, eos_token_id=None).token_ids)
    engine = EmbeddedEngine(blender, pass_rows=16, least_gain=-(10**6))
    try:
        sampling = Sampling(max_tokens=6, ignore_eos=True)
        asked = [ask(engine, LAYOUT, sampling, config=ASKED, cold=True) for _ in range(3)]
        for answer in asked:
            assert answer.wait().tokens == expected
            assert answer.figures.quality is not None
            assert answer.figures.quality["ratio"] == (*RATIOS, 1.0)[until]
    finally:
        engine.close()
