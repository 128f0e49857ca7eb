"""Rows by vLLM's own model compared with kvblend's decoder, on a tiny random model: the same KV, scores and answers.

`test_rows.py` runs this file in a process of its own, in which vLLM's engine is. The tests share a store, which grows.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from offline import Engine
from rows_connector import WORKERS
from tiny import save_model

from blend.chunks.encode import leave_probe
from blend.chunks.surrogate import with_surrogate
from blend.config import BlendConfig
from blend.eval.estimates import FixedRatio
from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.decoder import PromptBlocks
from blend.integrations.vllm.loads import RowBlender, row_blender
from blend.integrations.vllm.prompts import BOOK
from blend.integrations.vllm.workers import ColdError
from blend.model.decoder import Decoder
from blend.prefill.blender import Blend, Blender
from blend.serve.prompts.learned import LearnedCaches
from blend.store import open_store
from blend.types import CacheKind, PromptLayout
from tests.layouts import marked
from tests.store.reading import flip

LENGTHS = (127, 128, 129, 517, 630)
STEPS = 16
SETTINGS: dict[str, Any] = {"ratio": 0.15, "correction": False}
CLOSE = 1e-4  # relative to the largest entry: other summation orders in float32, nothing else


def prompt(length: int) -> PromptLayout:
    """A prefix of 20 tokens, four chunks, of which none ends where a block does, and a question of 9."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 512, (length,), generator=draw).tolist()
    shared = torch.randint(5, 512, (20,), generator=torch.Generator().manual_seed(7)).tolist()
    cuts = [20, *(20 + (length - 29) * part // 9 for part in (2, 4, 7)), length - 9]
    chunks = tuple(tuple(ids[a:b]) for a, b in pairwise(cuts))
    return PromptLayout.of_chunks(tuple(shared), chunks, tuple(ids[-9:]))


def greedy(decoder: Decoder, blend: Blend) -> list[int]:
    """By kvblend's own decoding."""
    found, logits = list[int](), blend.logits[0]
    for _ in range(STEPS):
        found.append(int(logits.argmax()))
        logits = decoder.append(torch.tensor([[found[-1]]]), blend.cache)[0, -1]
    return found


def far(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((mine - other).abs().amax() / other.abs().amax())


class Proof:
    """model: what vLLM loads. decoder: what is to give the same; its caches and its probe are in the store. more: of vLLM."""

    def __init__(
        self, folder: Path, model: Path, decoder: Decoder, lengths: tuple[int, ...] = LENGTHS, **more: Any
    ) -> None:
        self.folder = folder
        self.decoder = decoder
        self.store = open_store(str(folder / "store" / "kv"))
        self.blender = Blender(self.decoder, self.store, BlendConfig(**SETTINGS))
        self.layouts = [prompt(length) for length in lengths]
        leave_probe(self.store, self.decoder)
        for layout in self.layouts:
            library = self.blender.library(layout.prefix)
            library.compute(library.missing(layout.chunks))
        options = {"store": str(folder / "store"), "learn": False, **SETTINGS}
        self.engine = Engine(model, options, "rows_connector", max_num_seqs=8, max_num_batched_tokens=1024, **more)
        self.worker = WORKERS[-1]
        self.rows = self.worker.blender

    def decoded(self, salt: str, *, tickets: bool = True) -> list[list[int]]:
        """Greedy tokens of every prompt by vLLM, blended or plain."""
        return self.engine.tokens(asked(self.layouts, salt, tickets=tickets), STEPS)

    def configured(self, **changes: Any) -> BlendConfig:
        config = replace(self.blender.config, **changes)
        self.worker.blender = RowBlender(self.rows.decoder, self.store, config)
        return config

    def check(self, **changes: Any) -> None:
        """For a configuration, rows, their KV, scores and the answers are those of kvblend's decoder."""
        config = self.configured(**changes)
        mine = [self.blender.prefill(layout, config=config) for layout in self.layouts]
        for one, layout in zip(mine, self.layouts, strict=True):
            two = blended(self.worker.blender, layout)
            assert one.selection.rows.tolist() == two.selection.rows.tolist()
            assert self.apart(one, two.cache) < CLOSE
            if one.selection.scores is not None:
                assert far(two.selection.scores, one.selection.scores) < CLOSE
        assert self.decoded(json.dumps(changes)) == [greedy(self.decoder, one) for one in mine]

    def apart(self, blend: Blend, cache: Any) -> float:
        """How far apart is the KV of all rows but the last, which vLLM runs, in all layers."""
        last = blend.layout.rows - 1
        return max(
            far(theirs[:, :, :last], ours[:, :, :last])
            for layer in range(len(self.decoder.layers))
            for theirs, ours in zip(cache.view(layer), blend.cache.view(layer), strict=True)
        )

    def missing(self, layout: PromptLayout) -> int:
        """How many caches of a prompt's chunks are missing in the store."""
        return len(self.blender.library(layout.prefix).missing(layout.chunks))

    def reply(self, layout: PromptLayout, salt: str) -> dict[str, Any]:
        """The connector's figures of a prompt through the engine."""
        found: dict[str, Any] = self.engine.outputs(asked([layout], salt), STEPS)[0].kv_transfer_params["kvblend"]
        return found


def asked(
    layouts: list[PromptLayout], salt: str, *, tickets: bool = True, brought: bool = False
) -> list[tuple[PromptLayout, str | None, str]]:
    """These prompts with tickets, or plain. brought: by a client, with all their chunks."""
    found = []
    for number, layout in enumerate(layouts):
        ticket = LayoutTicket(marked(layout, new=range(len(layout.chunks))) if brought else layout).ticket()
        found.append((layout, ticket if tickets else None, f"{salt}{number}"))
    return found


def spare(layout: PromptLayout) -> PromptBlocks:
    """Blocks at the end of the engine's cache, which it takes last."""
    return PromptBlocks(tuple(range(100, 100 - layout.rows // 128 - 2, -1)), 0, layout.rows - 1)


def blended(rows: RowBlender, layout: PromptLayout, **more: Any) -> Blend:
    """All passes of a prompt at once, into blocks that the engine does not use."""
    passes = rows.blending(layout, spare(layout), **more)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


def drain(rows: RowBlender) -> None:
    """Compute all that was missing."""
    while len(rows.background):
        rows.background.run(alone=True)


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("rows")
    model = save_model(folder / "model")
    return Proof(folder, model, Decoder.load(str(model), device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def plain(proof: Proof) -> list[list[int]]:
    """Answers after full prefill."""
    full = BlendConfig(ratio=1.0)
    return [greedy(proof.decoder, proof.blender.prefill(layout, config=full)) for layout in proof.layouts]


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"ratio": 1.0}, {"ratio": 0.0}, {"selector": "random", "ratio": 0.3}),
        {"selector": "hkvd"},
    ],
    ids=str,
)
def test_the_same_rows_kv_and_answer(proof: Proof, changes: dict[str, Any]) -> None:
    proof.check(**changes)


def test_all_rows_are_full_prefill(proof: Proof, plain: list[list[int]]) -> None:
    assert proof.decoded("native", tickets=False) == plain


def test_caches_are_shared_only_where_a_probe_shows_them_alike(proof: Proof) -> None:
    def decoder(store: str) -> Any:
        return row_blender(proof.rows.decoder.model, {"store": str(proof.folder / store), **SETTINGS}).decoder

    assert proof.rows.decoder.fingerprint == proof.decoder.fingerprint
    assert decoder("empty").fingerprint != proof.decoder.fingerprint
    half = Decoder.load(str(proof.folder / "model"), device="cpu", dtype="bfloat16")
    leave_probe(open_store(str(proof.folder / "half" / "kv")), half)
    assert decoder("half").identity((1,)) == half.identity((1,)), "in another dtype"


def correct(proof: Proof) -> None:
    """Put surrogate context and KV corrections into the store."""
    prefix, chunks = proof.layouts[0].prefix, [chunk for layout in proof.layouts for chunk in layout.chunks]
    library = with_surrogate(proof.blender.library(prefix), chunks, 60)
    library.compute(library.missing(chunks))
    proof.blender.calibrate(prefix, chunks)
    assert proof.blender.correction(prefix, CacheKind.CONTEXTUAL)


def test_the_same_with_surrogate_context_and_corrections(proof: Proof) -> None:
    correct(proof)
    proof.check(correction=True, ratio=0.2)


@pytest.mark.parametrize("ratio", [0.05, 0.6])
def test_a_quality_is_kept_by_the_same_rows(proof: Proof, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    correct(proof)
    config, rows = proof.configured(correction=True, quality=0.05), proof.worker.blender
    mine, theirs = FixedRatio(ratio), FixedRatio(ratio)
    monkeypatch.setattr(proof.blender, "estimators", mine)
    rows.filler().estimators = theirs
    for layout in proof.layouts[-2:]:
        one, two = proof.blender.prefill(layout, config=config), blended(rows, layout)
        assert one.quality == two.quality is not None
        assert one.selection.rows.tolist() == two.selection.rows.tolist()
        assert proof.apart(one, two.cache) < CLOSE
    assert [pair for prompt in theirs.prompts for signals in prompt for pair in signals] == pytest.approx(
        [pair for prompt in mine.prompts for signals in prompt for pair in signals], rel=1e-3
    )
    assert proof.reply(proof.layouts[-1], f"quality {ratio}")["quality"]["ratio"] == ratio
    plain = RowBlender(rows.decoder, proof.store, replace(config, quality=None))
    plain.filler().estimators = theirs
    layout = proof.layouts[-1]
    assert blended(plain, layout).quality is None
    assert blended(plain, layout, quality=0.05).quality is not None


@pytest.mark.parametrize("kind", CacheKind)
def test_chunk_caches_are_those_of_the_encoder(proof: Proof, kind: CacheKind) -> None:
    layout = proof.layouts[-1]
    mine, theirs = (
        dict(filler.library(layout.prefix).encoder(kind).encode(layout.chunks))
        for filler in (proof.blender, proof.rows.filler())
    )
    for number, cache in mine.items():
        pairs = zip((*theirs[number].keys, *theirs[number].values), (*cache.keys, *cache.values), strict=True)
        assert max(far(one, two) for one, two in pairs) < CLOSE


def test_a_cold_prompt_is_left_to_vllm_and_its_caches_are_stored_later(proof: Proof) -> None:
    layout, config = prompt(333), proof.configured()
    rows, before = proof.worker.blender, proof.missing(layout)
    with pytest.raises(ColdError):
        blended(rows, layout)
    drain(rows)
    assert before - proof.missing(layout) >= 3
    mine, again = proof.blender.prefill(layout, config=config), blended(rows, layout)
    assert all(mine.hits)
    assert all(again.hits)
    assert proof.apart(mine, again.cache) < CLOSE


def test_caches_of_a_worker_without_a_correction_are_blended_at_the_safe_ratio(proof: Proof) -> None:
    """Computed in pieces that running answers can wait for."""
    own = proof.rows.decoder.named("own", "float32")
    rows, layout, passes = RowBlender(own, proof.store, BlendConfig(ratio=0.15)), prompt(800), list[int]()
    with pytest.raises(ColdError):
        blended(rows, layout)
    run = own.model.run
    own.model.run = lambda one, see: (passes.append(one.token_ids.shape[0]), run(one, see))[1]
    drain(rows)
    own.model.run = run
    assert max(passes) <= 32
    blend = blended(rows, layout)
    assert blend.uncorrected
    proof.worker.blender = rows
    figures = proof.reply(layout, "figures")
    assert figures["notes"] == ["there is no KV correction for these caches yet: 30% of the rows recomputed"]
    assert figures["uncorrected"]
    assert figures["rows_computed"] == blend.selection.rows.shape[0]
    rows.background.close()


def test_an_idle_engine_stores_missing_caches_and_then_rests(proof: Proof) -> None:
    layout = prompt(401)
    proof.configured()
    before = proof.missing(layout)
    full = greedy(proof.decoder, proof.blender.prefill(layout, config=BlendConfig(ratio=1.0)))
    assert proof.engine.tokens(asked([layout], "learnt"), STEPS) == [full]
    assert proof.reply(prompt(402), "cold")["reason"] == "cold"
    assert 3 <= before >= proof.missing(layout) > 0, "while the answer ran a few rows were computed at a time"
    assert proof.engine.idle() > 0
    assert (proof.missing(layout), proof.engine.idle()) == (0, 0)


def test_texts_of_clients_are_stored_only_where_learning_is_on(proof: Proof) -> None:
    layout = prompt(417)
    proof.worker.blender = proof.rows  # as the engine is configured
    proof.engine.tokens(asked([layout], "off", brought=True), STEPS)
    proof.engine.idle()
    assert proof.missing(layout) >= len(layout.chunks)
    learned = LearnedCaches(proof.folder / "store" / BOOK, 10**9)
    proof.worker.blender = RowBlender(proof.rows.decoder, proof.store, proof.blender.config, learned)
    proof.engine.tokens(asked([layout], "on", brought=True), STEPS)
    proof.engine.idle()
    assert proof.missing(layout) == 0


def test_a_damaged_entry_is_computed_and_counted_and_not_shown_to_clients(proof: Proof) -> None:
    layout = proof.layouts[3]
    library = proof.blender.library(layout.prefix)
    entry = next((proof.folder / "store").rglob(f"{library.key(library.variants([layout.chunks[1]])[-1]).digest}*"))
    flip(entry, -1000)
    mine, theirs = proof.blender.prefill(layout), blended(proof.worker.blender, layout)
    assert len(theirs.problems) == 1
    assert proof.apart(mine, theirs.cache) < CLOSE
    connector = proof.engine.llm.llm_engine.engine_core.engine_core.scheduler.connector
    counted, take = dict[str, int](), connector.get_kv_connector_stats
    connector.get_kv_connector_stats = lambda: (stats := take()) and (counted.update(stats.data), stats)[1]
    reply = proof.reply(layout, "damaged")
    connector.get_kv_connector_stats = take
    assert (counted["damaged_entries"], counted["prompts_blended"]) == (1, 1)
    assert reply.keys() == {"rows", "rows_reused", "rows_computed"}


def test_a_blend_of_some_rows_answers_otherwise(proof: Proof, plain: list[list[int]]) -> None:
    """On a random model stale KV shows in the answer, so that equal answers mean equal KV."""
    assert proof.decoded("e") != plain
