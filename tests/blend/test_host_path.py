"""What the host does between a prompt's layout and its first token: nothing for each chunk, and no look at the device."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from cases import make_layout
from host_reads import refused_reads
from models import decoder
from places import REPOSITORY

from blend.config import BlendConfig
from blend.prefill.blender import Blender
from blend.store import open_store
from blend.types import PromptLayout

SUFFIX = (9, 8, 7, 6, 5)
CONTEXT = 448
CONFIGS = {
    "reuse": BlendConfig("none"),
    "by the question": BlendConfig("query_guided", ratio=0.1),
    "by deviation": BlendConfig("hkvd", ratio=0.1),
}


def prompt(chunks: int, tokens: int = CONTEXT) -> PromptLayout:
    context = make_layout(chunks=(tokens,)).chunks[0]
    size = tokens // chunks
    return PromptLayout.of_chunks((1, 2, 3), [context[at : at + size] for at in range(0, tokens, size)], SUFFIX)


def filled(layout: PromptLayout, *, corrected: bool) -> Blender:
    blender = Blender(decoder("llama"), open_store("memory:"))
    library = blender.library(layout.prefix)
    corpus = [tuple(3 + (7 * i + j) % 60 for j in range(14)) for i in range(60)]
    library.compute(library.missing(layout.chunks))
    if corrected:
        assert blender.calibrate(layout.prefix, corpus)
    return blender


def calls(run: Callable[[], object]) -> int:
    """Calls of Python and of C functions that Python makes."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", CONFIGS)
def test_a_chunk_costs_one_look_up(name):
    counts = [_calls_of_a_prefill(chunks, CONFIGS[name]) for chunks in (8, 64)]
    assert (counts[1] - counts[0]) / 56 <= 1.5


def _calls_of_a_prefill(chunks: int, config: BlendConfig) -> int:
    layout = prompt(chunks)
    blender = filled(layout, corrected=True)
    for _ in range(2):
        blender.prefill(layout, config=config)
    return min(calls(lambda: blender.prefill(layout, config=config)) for _ in range(3))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_read_before_the_first_token(name, corrected, monkeypatch):
    layout = prompt(8)
    blender = filled(layout, corrected=corrected)
    expected = blender.prefill(layout, config=CONFIGS[name])
    with refused_reads(monkeypatch):
        blend = blender.prefill(layout, config=CONFIGS[name])
    assert torch.equal(blend.logits, expected.logits)


def test_a_read_would_be_seen(monkeypatch):
    layout = prompt(8)
    blender = filled(layout, corrected=False)
    blend = blender.prefill(layout)
    with refused_reads(monkeypatch), pytest.raises(AssertionError, match="waits for the device"):
        _ = blend.exact_rows


def test_launches_are_few_and_none_is_of_a_chunk():
    place = {"PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests")))}
    script = REPOSITORY / "tests" / "blend" / "launches.py"
    run = subprocess.run([sys.executable, script], env={**os.environ, **place}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    reuse, few, many = json.loads(run.stdout)
    assert few == many
    # Layer 1 prepares the correction for all; the last layer chooses rows and ends the pass.
    assert 1 <= sum(reuse["layer 2"].values()) <= 6, "one pass"
    assert 1 <= sum(few["layer 2"].values()) <= 2 * 6, "the question's pass and that of the chosen rows"
