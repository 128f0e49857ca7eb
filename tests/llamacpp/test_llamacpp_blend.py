"""Blended prefill with llama.cpp as the decoder, against the same blend in transformers on the same weights."""

from dataclasses import replace

import pytest
import torch

from blend import BlendConfig, Blender, open_store
from blend.integrations.llamacpp.context import SEQUENCES
from blend.integrations.llamacpp.rows import runs_of
from blend.layout import PromptLayout
from blend.model.decoder import full_prefill
from blend.prefill.blender import Blend
from tests.llamacpp.llamacpp_engines import NAMES, WINDOW, Engines, token_ids
from tests.llamacpp.test_llamacpp_rows import CLOSE, difference, rows_of

CHUNKS = tuple(tuple(token_ids(24, seed)[0].tolist()) for seed in (1, 2, 3))


def prompt(*chunks: tuple[int, ...]) -> PromptLayout:
    """A prefix, the chunks and a question."""
    return PromptLayout.of_chunks((5, 6, 7), chunks or CHUNKS, tuple(token_ids(6, 9)[0].tolist()))


def blended(decoder: object, layout: PromptLayout, config: BlendConfig, chunks: int = 3) -> Blend:
    """A prompt blended from a store that holds its first chunks."""
    blender = Blender(decoder, open_store("memory:"), config)
    library = blender.library(layout.prefix)
    library.compute(library.missing(layout.chunks[:chunks]))
    return blender.prefill(layout)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_a_blend_chooses_the_rows_that_transformers_chooses(engines: Engines, name: str, ratio: float) -> None:
    """The question's attention, its selection, and what recomputing one run after another gives."""
    pair = engines.pair(name)
    config = BlendConfig(ratio=ratio, selector="query_guided:layers=all,lead=0")
    layout = prompt()
    theirs = blended(pair.theirs, layout, config)
    pair.ours.wave_rows = 1
    ours = blended(pair.ours, layout, config)
    assert ours.hits == (True, True, True)
    assert torch.equal(ours.selection.rows, theirs.selection.rows)
    assert difference(ours.logits, theirs.logits) < CLOSE
    if ratio:
        assert difference(ours.selection.scores, theirs.selection.scores) < CLOSE
        assert len(ours.selection.rows) == len(layout.suffix) + round(ratio * 72)
    stale = set(range(3, 75)) - set(ours.selection.rows.tolist())
    for layer in range(len(pair.ours.layers)):
        keys, values = theirs.cache.view(layer)
        rows = sorted(stale)
        for part, expected in zip(ours.cache.view(layer), (pair.as_ours(keys), values), strict=True):
            assert difference(part[:, :, rows], expected[:, :, rows]) < CLOSE, layer


@pytest.mark.parametrize("name", NAMES)
def test_all_rows_recomputed_are_full_prefill(engines: Engines, name: str) -> None:
    """Ratio 1, and a prompt of which the store holds a part."""
    pair = engines.pair(name)
    full = full_prefill(pair.ours, prompt())
    for chunks in (3, 0):
        blend = blended(pair.ours, prompt(), BlendConfig(ratio=1.0), chunks)
        assert difference(blend.logits, full.logits) < CLOSE
        assert blend.first_token == full.first_token


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_chunks_that_are_missing_are_computed(engines: Engines, stored: int) -> None:
    """Any number of chunks from the store: rows without KV are never looked at before they are there."""
    pair = engines.pair("qwen2")
    pair.ours.wave_rows = 96
    config = BlendConfig(ratio=0.3)
    theirs = blended(pair.theirs, prompt(), config, stored)
    ours = blended(pair.ours, prompt(), config, stored)
    assert ours.hits == tuple(index < stored for index in range(3))
    assert torch.equal(ours.selection.rows, theirs.selection.rows)
    for layer in range(len(pair.ours.layers)):
        values = ours.cache.view(layer)[1]
        assert difference(values[:, :, :3], theirs.cache.view(layer)[1][:, :, :3]) < CLOSE
        assert values.abs().amax((1, 3)).min() > 0


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("selector", ["hkvd", "mixed", "gradual"])
def test_deviation_selects_what_it_selects_in_transformers(engines: Engines, name: str, selector: str) -> None:
    """Selectors with check layers, windowed layers too: fresh KV of all rows there, and then only the chosen rows.

    `gradual` chooses again at later layers. There a row does not see what the dropped rows had become, so that it may choose
    otherwise at the border.
    """
    pair = engines.pair(name, ubatch=32)
    pair.ours.wave_rows = 1
    config = BlendConfig(ratio=0.2, selector=selector)
    theirs = blended(pair.theirs, prompt(), config)
    ours = blended(pair.ours, prompt(), config)
    if selector == "gradual":
        common = set(ours.selection.rows.tolist()) & set(theirs.selection.rows.tolist())
        assert len(common) >= len(theirs.selection.rows) - 2
    else:
        assert torch.equal(ours.selection.rows, theirs.selection.rows)


def test_many_runs_are_narrowed_down(engines: Engines) -> None:
    """More scattered rows than a context has sequences are looked at again at a later layer."""
    pair = engines.pair("qwen2", tokens=2048, max_position_embeddings=2048)
    chunks = tuple(tuple(token_ids(10, seed)[0].tolist()) for seed in range(90))
    ours = blended(pair.ours, prompt(*chunks), BlendConfig(ratio=0.3, selector="gradual:lead=1"), 90)
    assert len(runs_of(ours.selection.rows.tolist())) > SEQUENCES
    pair.ours.wave_rows = 24


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_question_is_longer_than_a_window_and_a_batch(engines: Engines, name: str) -> None:
    """Its attention and its KV are those of transformers, though states leave rows out, and each batch shows its layers."""
    pair = engines.pair(name, ubatch=32)
    layout = PromptLayout.of_chunks((5, 6, 7), CHUNKS, tuple(token_ids(3 * WINDOW, 9)[0].tolist()))
    config = BlendConfig(ratio=0.2, selector="query_guided:layers=all,lead=0")
    theirs = blended(pair.theirs, layout, config)
    ours = blended(pair.ours, layout, config)
    assert torch.equal(ours.selection.rows, theirs.selection.rows)
    assert difference(ours.logits, theirs.logits) < CLOSE


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_corrections_are_in_the_cells(engines: Engines, name: str) -> None:
    """What a correction adds to stored rows is read back from llama.cpp, and the question attends to it."""
    pair = engines.pair(name)
    layout = prompt()
    stale = slice(27, 75)  # rows of the second and third chunk
    shares = {}
    logits = {}
    for engine, decoder in (("theirs", pair.theirs), ("ours", pair.ours)):
        blender = Blender(decoder, open_store("memory:"), BlendConfig(ratio=0.0, selector="none", surrogate=False))
        library = blender.library(layout.prefix)
        library.compute(library.missing(layout.chunks))
        blender.calibrate(layout.prefix, layout.chunks)
        whole = decoder.new_cache(layout.rows)
        decoder.prefill([rows_of(torch.tensor([layout.token_ids]), [*range(layout.rows)], whole)])
        for corrected in (True, False):
            blend = blender.prefill(layout, config=replace(blender.config, correction=corrected))
            parts = zip(blend.cache.view(1), whole.view(1), strict=True)
            errors = [(part[:, :, stale].float() - fresh[:, :, stale].float()).norm() for part, fresh in parts]
            shares[engine, corrected] = float(sum(errors))
            logits[engine, corrected] = blend.logits
    for engine in ("theirs", "ours"):
        assert shares[engine, True] < 0.8 * shares[engine, False]
        changed = difference(logits[engine, True], logits[engine, False])
        assert changed > 10 * difference(logits["ours", True], logits["theirs", True])


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_an_eight_bit_cache_chooses_nearly_the_same_rows(engines: Engines, name: str) -> None:
    """Keys and queries are turned in llama.cpp alike; the question's attention is that of transformers."""
    pair = engines.pair(name, cache_type="q8_0", hidden_size=256, head_dim=64)
    config = BlendConfig(ratio=0.2, selector="query_guided:layers=0+1,lead=0")
    theirs = blended(pair.theirs, prompt(), config)
    ours = blended(pair.ours, prompt(), config)
    assert difference(ours.selection.scores, theirs.selection.scores) < 0.1
    common = set(ours.selection.rows.tolist()) & set(theirs.selection.rows.tolist())
    assert len(common) >= len(theirs.selection.rows) - 2
