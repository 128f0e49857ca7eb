"""A greedy answer does not depend on how busy the server is, nor does whether the KV correction fits its prompt."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from engines import FEW, Answer, ask
from models import VOCABULARY, decoder

from blend.chunks.correction import Bounds
from blend.config import BlendConfig
from blend.layout import PromptLayout
from blend.prefill.blender import Blender
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.store import open_store

PREFIX = (5, 6, 7, 8, 9)
PROMPTS = 90
TOGETHER = 16
TIMES = 2.0  # so much more than is fitted, the map does harm to about half of the prompts


@pytest.fixture(scope="module")
def corpus() -> tuple[Blender, list[PromptLayout]]:
    """Stored chunks with a map that fits some of the prompts only."""
    draw = random.Random(0)
    chunks = [tuple(draw.choices(range(3, VOCABULARY), k=draw.choice((14, 30, 60)))) for _ in range(60)]
    blender = Blender(decoder("qwen2"), open_store("memory:", codec="native"), BlendConfig("query_guided", ratio=0.4))
    library = blender.library(PREFIX)
    library.compute(library.missing(chunks))
    blender.calibrate(PREFIX, chunks)
    name, found = blender.encoder(PREFIX).identity.correction_name, blender.correction(PREFIX)
    assert found is not None
    scaled = [
        part and replace(part, up=part.up * TIMES, bounds=Bounds(part.bounds.reach, 1e6, 1e6)) for part in found.layers
    ]
    blender.store.write_artifact(name, replace(found, layers=tuple(scaled)).to_bytes())
    prompts = [
        PromptLayout.of_chunks(
            PREFIX, tuple(draw.sample(chunks, draw.choice((3, 5, 8)))), tuple(draw.choices(range(3, 90), k=6))
        )
        for _ in range(PROMPTS)
    ]
    return blender, prompts


def answers(blender: Blender, prompts: list[PromptLayout], together: int, pass_rows: int) -> Iterator[Answer]:
    """To these prompts, so many at a time."""
    options = {"prefix_budget": 0, "least_gain": -(10**6), "remember": False}  # nothing is left to later prompts
    with closing(EmbeddedEngine(blender, most_running=TOGETHER, pass_rows=pass_rows, **options)) as engine:
        for at in range(0, len(prompts), together):
            asked = [ask(engine, layout, FEW, trace=True) for layout in prompts[at : at + together]]
            yield from [answer.wait() for answer in asked]


@pytest.fixture(scope="module")
def alone(corpus: tuple[Blender, list[PromptLayout]]) -> list[Answer]:
    found = list(answers(*corpus, 1, 150 + TOGETHER))
    unfit = sum(bool(answer.figures.notes) for answer in found)
    assert PROMPTS / 4 < unfit < PROMPTS * 3 / 4
    return found


@pytest.mark.parametrize("rows", [10, 150])
def test_an_answer_is_the_same_alone_and_among_fifteen_others(
    rows: int, corpus: tuple[Blender, list[PromptLayout]], alone: list[Answer]
) -> None:
    blender, prompts = corpus
    for mine, theirs in zip(answers(blender, prompts, TOGETHER, rows + TOGETHER), alone, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.figures.notes == theirs.figures.notes
        assert mine.figures.rows_computed == theirs.figures.rows_computed
        assert [row.recomputed for row in mine.started.trace] == [row.recomputed for row in theirs.started.trace]
