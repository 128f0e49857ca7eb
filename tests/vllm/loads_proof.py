"""Loads in vLLM's engine: around block edges, in small batches, with few blocks, failed, cancelled, beside plain prompts.

`test_rows.py` runs this file in processes of its own, one for each of vLLM's model runners.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offline import Engine, salt
from rows_connector import FAILS, WORKERS, Worker
from rows_proof import SETTINGS, STEPS, greedy, prompt
from tiny import save_model

from blend.chunks.encode import leave_probe
from blend.config import BlendConfig
from blend.integrations.vllm.contract import LayoutTicket
from blend.model.decoder import Decoder
from blend.prefill.blender import Blender
from blend.store import open_store
from blend.types import PromptLayout

BLOCK = 128  # rows, as vLLM chooses on a CPU
EDGES = (*(BLOCK + more for more in (-1, 0, 1, 2)), *(2 * BLOCK + more for more in (-1, 0, 1)), 517)


class Caches:
    """A model, and a store with the caches of prompts."""

    def __init__(self, folder: Path) -> None:
        self.model = save_model(folder / "model")
        self.store = folder / "store"
        self.decoder = Decoder.load(str(self.model), device="cpu", dtype="float32")
        store = open_store(str(self.store / "kv"))
        leave_probe(store, self.decoder)
        self.blender = Blender(self.decoder, store, BlendConfig(**SETTINGS))

    def layout(self, rows: int, last: int | None = None) -> PromptLayout:
        """A prompt with caches in the store. last: its last token."""
        layout = prompt(rows)
        library = self.blender.library(layout.prefix)
        library.compute(library.missing(layout.chunks))
        return layout if last is None else replace(layout, suffix=(*layout.suffix[:-1], last))

    def blended(self, layout: PromptLayout) -> list[int]:
        return greedy(self.decoder, self.blender.prefill(layout))

    def full(self, layout: PromptLayout) -> list[int]:
        return greedy(self.decoder, self.blender.prefill(layout, config=BlendConfig(ratio=1.0)))

    @contextmanager
    def engine(self, **more: Any) -> Iterator[Engine]:
        options = {"store": str(self.store), "learn": False, **SETTINGS}
        engine = Engine(self.model, options, "rows_connector", **more)
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    torch.set_num_threads(1)
    return Caches(tmp_path_factory.mktemp("loads"))


@pytest.fixture(scope="module")
def engine(caches: Caches) -> Iterator[Engine]:
    with caches.engine(max_num_seqs=8) as engine:
        yield engine


@pytest.fixture
def worker(engine: Engine) -> Worker:
    return WORKERS[-1]


def ticketed(layout: PromptLayout) -> tuple[PromptLayout, str, str]:
    return layout, LayoutTicket(layout).ticket(), salt()


def test_around_every_block_edge_alone_together_and_beside_plain_prompts(caches: Caches, engine: Engine) -> None:
    layouts = [caches.layout(rows) for rows in EDGES]
    full = [caches.full(layout) for layout in layouts]
    blended = [caches.blended(layout) for layout in layouts]
    assert all(some != every for some, every in zip(blended, full, strict=True)), "or nothing could be seen"
    assert [engine.tokens([ticketed(layout)], STEPS)[0] for layout in layouts] == blended
    assert engine.tokens([ticketed(layout) for layout in layouts], STEPS) == blended
    mixed = [*map(ticketed, layouts), *((layout, None, None) for layout in layouts)]
    assert engine.tokens(mixed, STEPS) == blended + full


def test_a_plain_prompt_after_a_blended_one_of_the_same_tokens(caches: Caches, engine: Engine) -> None:
    layout = caches.layout(3 * BLOCK + 9)  # its context ends where a block does
    given = LayoutTicket(layout).ticket()
    assert engine.tokens([(layout, given, "salted")], STEPS) == [caches.blended(layout)]
    assert engine.tokens([(layout, None, None)], STEPS) == [caches.full(layout)]
    assert engine.tokens([(layout, None, "salted")], STEPS) == [caches.blended(layout)], "its blocks, for its like"
    fresh = caches.layout(410)
    unsalted = LayoutTicket(fresh).ticket()
    assert engine.tokens([(fresh, unsalted, None)], STEPS) == [caches.full(fresh)], "it would poison others"


@pytest.mark.parametrize("rows", [BLOCK + 1, 300])
def test_a_load_that_fails_is_computed_by_vllm(caches: Caches, engine: Engine, rows: int) -> None:
    """Five of five answers were wrong in vLLM's second runner after a failed synchronous load."""
    fails, good = caches.layout(rows, FAILS), caches.layout(rows)
    full, blended = caches.full(fails), caches.blended(good)
    assert engine.tokens([ticketed(fails)], STEPS) == [full]
    several = [ticketed(fails), ticketed(good), ticketed(fails), (good, None, None)]
    assert engine.tokens(several, STEPS) == [full, blended, full, caches.full(good)]
    [output] = engine.outputs([ticketed(fails)], STEPS)
    assert output.kv_transfer_params["kvblend"]["reason"] == "failed"


@pytest.mark.parametrize("nonsense", [{"kvblend": {"ticket": "[[1]]", "signature": "0"}}, {"kvblend": 1}, {"other": 1}])
def test_parameters_that_are_no_tickets(caches: Caches, engine: Engine, nonsense: Any) -> None:
    layout = caches.layout(300)
    assert engine.tokens([(layout, nonsense, salt())], STEPS) == [caches.full(layout)]


def test_a_ticket_of_another_prompt(caches: Caches, engine: Engine) -> None:
    layout, other = caches.layout(300), caches.layout(BLOCK)
    wrong = json.dumps([[20, 900], ["corpus"], [], None, "", None, ""])
    assert engine.tokens([(layout, wrong, salt()), ticketed(other)], STEPS) == [
        caches.full(layout),
        caches.blended(other),
    ]


def test_one_prompt_after_another_the_shortest_first(caches: Caches, engine: Engine, worker: Worker) -> None:
    """So eight that come together do not all wait for the last."""
    long, short, middle = (caches.layout(rows) for rows in (630, BLOCK + 1, 300))
    worker.steps.clear()
    names = [engine.add(ticketed(layout), STEPS) for layout in (long, short, middle)]
    first_tokens: list[str] = []
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            if output.request_id not in first_tokens:
                first_tokens.append(output.request_id)
    order = [name for index, name in enumerate(worker.steps) if name not in worker.steps[:index]]
    assert [names.index(name[: len(names[0])]) for name in order] == [1, 2, 0]
    assert [names.index(name) for name in first_tokens] == [1, 2, 0]


def test_a_request_that_is_cancelled_while_it_waits_or_loads(caches: Caches, engine: Engine, worker: Worker) -> None:
    layout, other = caches.layout(630), caches.layout(300)
    running = engine.llm.llm_engine
    for steps in (0, 1, 2):
        names = [engine.add(ticketed(one), STEPS) for one in (layout, other)]
        for _ in range(steps):
            running.step()
        running.abort_request(names)
        while running.has_unfinished_requests():
            running.step()
    engine.idle()
    scheduler = running.engine_core.engine_core.scheduler
    assert scheduler.kv_cache_manager.usage == 0
    assert engine.tokens([ticketed(layout)], STEPS) == [caches.blended(layout)]


def test_what_vllms_prefix_cache_nearly_covers_is_left_to_it(caches: Caches, engine: Engine, worker: Worker) -> None:
    layout = caches.layout(4 * BLOCK + 9)
    ticket = (layout, LayoutTicket(layout).ticket(), salt())
    first = engine.tokens([ticket], STEPS)
    worker.steps.clear()
    [output] = engine.outputs([ticket], STEPS)
    assert list(output.outputs[0].token_ids) == first[0]
    assert worker.steps == []
    figures = output.kv_transfer_params["kvblend"]
    assert figures == {"rows": layout.rows, "rows_reused": 4 * BLOCK, "rows_computed": 9}
