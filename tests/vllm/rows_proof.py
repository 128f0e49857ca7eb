"""Rows by vLLM's own model compared with kvblend's decoder, on a tiny random model: the same KV, scores and answers.

`test_rows.py` runs this file in a process of its own, in which vLLM's engine is. The tests share a store, which grows.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import Caches, prompt
from offline import ticketed
from tiny import save_model

from blend.chunks.probe import leave_probe
from blend.chunks.surrogate import with_surrogate
from blend.config import BlendConfig
from blend.eval.estimates import FixedRatio
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.loads import BlendedLoad, RowBlender, sharing
from blend.integrations.vllm.scheduler import Load
from blend.layout import PromptLayout
from blend.model.decoder import Decoder
from blend.prefill.blender import Blend
from blend.prefill.prefill import NothingStoredError
from blend.store import open_store
from blend.types import CacheKind
from tests.layouts import marked
from tests.store.reading import flip

LENGTHS = (127, 128, 129, 517, 630)
CLOSE = 1e-4  # relative to the largest entry: other summation orders in float32, nothing else


def far(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((mine - other).abs().amax() / other.abs().amax())


class Proof(Caches):
    """With vLLM's engine in this process. more: of vLLM."""

    def __init__(
        self, folder: Path, model: Path, decoder: Decoder, lengths: tuple[int, ...] = LENGTHS, **more: Any
    ) -> None:
        super().__init__(folder, model, decoder)
        self.layouts = [self.layout(length) for length in lengths]
        self.llm = self.engine(max_num_batched_tokens=1024, **more)
        self.as_started = self.rows

    @property
    def rows(self) -> RowBlender:
        """What blends in the engine's worker."""
        return self.llm.queue.blender

    def decoded(self) -> list[list[int]]:
        """Greedy tokens of every prompt by vLLM."""
        return self.llm.tokens([ticketed(layout) for layout in self.layouts])

    def plain(self) -> list[list[int]]:
        """The same without kvblend."""
        return self.llm.tokens([(layout, None, None) for layout in self.layouts])

    def configured(self, **changes: Any) -> BlendConfig:
        config = replace(self.blender.config, **changes)
        self.llm.queue.blender = RowBlender(self.as_started.decoder, self.store, config)
        return config

    def check(self, **changes: Any) -> None:
        """For a configuration, rows, their KV, scores and the answers are those of kvblend's decoder."""
        config = self.configured(**changes)
        mine = [self.blender.prefill(layout, config=config) for layout in self.layouts]
        for one, layout in zip(mine, self.layouts, strict=True):
            two = blended(self.rows, layout)
            assert one.selection.rows.tolist() == two.selection.rows.tolist()
            assert self.apart(one, two.cache) < CLOSE
            if one.selection.scores is not None:
                assert far(two.selection.scores, one.selection.scores) < CLOSE
        assert self.decoded() == [self.greedy(one) for one in mine]

    def apart(self, blend: Blend, cache: Any) -> float:
        """How far apart is the KV of all rows but the last, which vLLM runs, in all layers."""
        last = blend.layout.rows - 1
        return max(
            far(theirs[:, :, :last], ours[:, :, :last])
            for layer in range(len(self.decoder.layers))
            for theirs, ours in zip(cache.view(layer), blend.cache.view(layer), strict=True)
        )


def blended(rows: RowBlender, layout: PromptLayout, **more: Any) -> Blend:
    """All passes of a prompt at once, into blocks that the engine does not use. more: of its ticket."""
    blocks = tuple(range(100, 100 - layout.rows // 128 - 2, -1))
    load = Load("", LayoutTicket(layout, **more), blocks, 0)
    passes = rows.blending(load, rows.shared.begin(load))
    while True:
        try:
            next(passes)
        except StopIteration as end:
            loaded: BlendedLoad = end.value
            return loaded.blend


def drain(rows: RowBlender) -> None:
    """Compute all that was missing."""
    while len(rows.background):
        rows.background.run(turn=1)


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("rows")
    model = save_model(folder / "model")
    proof = Proof(folder, model, Decoder.load(str(model), device="cpu", dtype="float32"))
    yield proof
    proof.llm.close()


CONFIGURATIONS = ({}, {"ratio": 1.0}, {"ratio": 0.0}, {"selector": "random", "ratio": 0.3}, {"selector": "hkvd"})


@pytest.mark.parametrize("changes", CONFIGURATIONS, ids=str)
def test_the_same_rows_kv_and_answer(proof: Proof, changes: dict[str, Any]) -> None:
    proof.check(**changes)


def test_caches_are_shared_only_where_a_probe_shows_them_alike(proof: Proof) -> None:
    decoder = proof.as_started.decoder
    apart = decoder.named("vLLM's own", "float32")

    def shared(store: str) -> Any:
        return sharing(apart, decoder.fingerprint, open_store(str(proof.folder / store / "kv")))

    assert decoder.fingerprint == proof.decoder.fingerprint
    assert shared("empty") is apart
    half = Decoder.load(str(proof.folder / "model"), device="cpu", dtype="bfloat16")
    leave_probe(open_store(str(proof.folder / "half" / "kv")), half)
    assert shared("half").identity((1,)) == half.identity((1,)), "in another dtype"


@pytest.fixture
def corrected(proof: Proof) -> Proof:
    """With surrogate context and KV corrections in the store."""
    prefix, chunks = proof.layouts[0].prefix, [chunk for layout in proof.layouts for chunk in layout.chunks]
    library = with_surrogate(proof.blender.library(prefix), chunks, 60)
    library.compute(library.missing(chunks))
    proof.blender.calibrate(prefix, chunks)
    assert proof.blender.correction(prefix, CacheKind.CONTEXTUAL)
    return proof


def test_the_same_with_surrogate_context_and_corrections(corrected: Proof) -> None:
    corrected.check(correction=True, ratio=0.2)


@pytest.mark.parametrize("ratio", [0.05, 0.6])
def test_a_quality_is_kept_by_the_same_rows(corrected: Proof, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, layout = corrected, corrected.layouts[-1]
    config = proof.configured(correction=True)
    mine, theirs = FixedRatio(ratio), FixedRatio(ratio)
    monkeypatch.setattr(proof.blender, "estimators", mine)
    proof.rows.blender().estimators = theirs
    one = proof.blender.prefill(layout, config=replace(config, quality=0.05))
    two = blended(proof.rows, layout, quality=0.05)
    assert one.quality == two.quality is not None
    assert one.selection.rows.tolist() == two.selection.rows.tolist()
    assert proof.apart(one, two.cache) < CLOSE
    [[signals], [expected]] = theirs.prompts, mine.prompts
    assert torch.tensor(signals) == pytest.approx(torch.tensor(expected), rel=1e-3)
    assert blended(proof.rows, layout).quality is None, "asked for by the ticket alone"


@pytest.mark.parametrize("kind", CacheKind)
def test_chunk_caches_are_those_of_the_encoder(corrected: Proof, kind: CacheKind) -> None:
    layout = corrected.layouts[-1]
    mine, theirs = (
        dict(blender.library(layout.prefix).encoder(kind).encode(layout.chunks))
        for blender in (corrected.blender, corrected.rows.blender())
    )
    for number, cache in mine.items():
        pairs = zip((*theirs[number].keys, *theirs[number].values), (*cache.keys, *cache.values), strict=True)
        assert max(far(one, two) for one, two in pairs) < CLOSE


def test_caches_without_a_correction_are_blended_at_the_safe_ratio(proof: Proof) -> None:
    own = proof.as_started.decoder.named("own", "float32")
    layout = prompt(800)
    proof.llm.queue.blender = RowBlender(own, proof.store, BlendConfig(ratio=0.15))
    with pytest.raises(NothingStoredError):
        blended(proof.rows, layout)
    drain(proof.rows)
    blend = blended(proof.rows, layout)
    assert blend.uncorrected
    figures = proof.llm.figures(ticketed(layout))
    assert figures["notes"] == ["there is no KV correction for these caches yet: 30% of the rows recomputed"]
    assert figures["uncorrected"]
    assert figures["rows_computed"] == blend.selection.rows.shape[0]


def test_an_idle_engine_stores_what_a_cold_prompt_missed_and_then_rests(proof: Proof) -> None:
    layout = prompt(401)
    config = proof.configured()
    before = proof.missing(layout)
    [output] = proof.llm.outputs([ticketed(layout)])
    assert list(output.outputs[0].token_ids) == proof.full(layout)
    assert output.kv_transfer_params["kvblend"]["reason"] == "cold"
    assert 3 <= before >= proof.missing(layout) > 0, "while the answer ran a few rows were computed at a time"
    assert proof.llm.idle() > 0
    assert (proof.missing(layout), proof.llm.idle()) == (0, 0)
    again = blended(proof.rows, layout)
    assert all(again.hits)
    assert proof.apart(proof.blender.prefill(layout, config=config), again.cache) < CLOSE


def test_texts_of_clients_are_not_stored_where_learning_is_off(proof: Proof) -> None:
    layout = prompt(417)
    proof.llm.queue.blender = proof.as_started
    proof.llm.tokens([ticketed(marked(layout, new=range(len(layout.chunks))))])
    proof.llm.idle()
    assert proof.missing(layout) > 0


@pytest.mark.parametrize("selector", ["query_guided", "random"])
def test_a_damaged_entry_is_computed_and_counted_and_not_shown_to_clients(
    proof: Proof, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = proof.layouts[3 if selector == "random" else 4]
    config = proof.configured(selector=selector)
    library = proof.blender.library(layout.prefix)
    entry = next((proof.folder / "store").rglob(f"{library.key(library.variants([layout.chunks[1]])[-1]).digest}*"))
    flip(entry, -1000)
    mine, theirs = proof.blender.prefill(layout, config=config), blended(proof.rows, layout)
    assert len(theirs.problems) == 1
    assert proof.apart(mine, theirs.cache) < CLOSE
    connector = proof.llm.llm.llm_engine.engine_core.engine_core.scheduler.connector
    counts, take = Counter[str](), connector.get_kv_connector_stats

    def taken() -> Any:
        stats = take()
        counts.update(stats.data if stats else {})
        return stats

    monkeypatch.setattr(connector, "get_kv_connector_stats", taken)
    reply = proof.llm.figures(ticketed(layout))
    assert (counts["damaged_entries"], counts["prompts_blended"]) == (1, 1)
    assert reply.keys() == {"rows", "rows_reused", "rows_computed"}
