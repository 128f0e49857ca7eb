"""What the host does between a prompt's layout and its first token: nothing for each chunk, and no look at the device."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from blends import filled
from cases import make_layout
from host_reads import refused_reads
from models import decoder
from places import REPOSITORY

from blend.config import BlendConfig
from blend.layout import PromptLayout
from blend.prefill.blender import Blender

CONFIGS = {
    "reuse": BlendConfig("none"),
    "by the question": BlendConfig("query_guided", ratio=0.1),
    "by deviation": BlendConfig("hkvd", ratio=0.1),
}


def prompt(chunks: int, tokens: int = 448) -> PromptLayout:
    context = make_layout(chunks=(tokens,)).chunks[0]
    size = tokens // chunks
    return PromptLayout.of_chunks(
        (1, 2, 3), [context[at : at + size] for at in range(0, tokens, size)], (9, 8, 7, 6, 5)
    )


def corrected(layout: PromptLayout) -> Blender:
    blender = filled(decoder("llama"), layout)
    assert blender.calibrate(layout.prefix, [tuple(3 + (7 * i + j) % 60 for j in range(14)) for i in range(60)])
    return blender


def calls(run: Callable[[], object]) -> int:
    """Calls of Python and of C functions that Python makes."""
    events = Counter[str]()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        run()
    finally:
        sys.setprofile(None)
    return events["call"] + events["c_call"]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_chunk_costs_one_look_up(config):
    least = []
    for layout in (prompt(8), prompt(64)):
        prefill = partial(corrected(layout).prefill, layout, config=config)
        least.append(min([calls(prefill) for _ in range(5)]))
    assert (least[1] - least[0]) / 56 <= 1.5


@pytest.mark.parametrize("made", [partial(filled, decoder("llama")), corrected], ids=["plain", "corrected"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_nothing_is_read_before_the_first_token(config, made, monkeypatch):
    layout = prompt(8)
    blender = made(layout)
    expected = blender.prefill(layout, config=config)
    with refused_reads(monkeypatch):
        blend = blender.prefill(layout, config=config)
    assert torch.equal(blend.logits, expected.logits)


def test_a_read_would_be_seen(monkeypatch):
    layout = prompt(8)
    blend = filled(decoder("llama"), layout).prefill(layout)
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
