"""Loads in vLLM's engine: around block edges, failed, cancelled, beside plain prompts.

`test_rows.py` runs this file in processes of its own, one for each of vLLM's model runners.
"""

from collections.abc import Iterator
from contextlib import closing

import pytest
from caches import Caches, tiny_caches
from offline import Engine, ticketed
from rows_connector import FAILS

from blend.integrations.vllm.contract import LayoutTicket
from blend.integrations.vllm.loads import RowBlender
from blend.layout import PromptLayout

BLOCK = 128  # rows, as vLLM chooses on a CPU
EDGES = (*(BLOCK + more for more in (-1, 0, 1, 2)), *(2 * BLOCK + more for more in (-1, 0, 1)), 517)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    return tiny_caches(tmp_path_factory.mktemp("loads"))


@pytest.fixture(scope="module")
def engine(caches: Caches) -> Iterator[Engine]:
    with closing(caches.engine()) as engine:
        yield engine


def check_edges(caches: Caches, engine: Engine) -> None:
    """Prompts around every block edge, together and beside plain ones."""
    layouts = [caches.layout(rows) for rows in EDGES]
    full = [caches.full(layout) for layout in layouts]
    blended = [caches.blended(layout) for layout in layouts]
    assert all(some != every for some, every in zip(blended, full, strict=True)), "or nothing could be seen"
    mixed = [*map(ticketed, layouts), *((layout, None, None) for layout in layouts)]
    assert engine.tokens(mixed) == blended + full


def test_around_every_block_edge_alone_together_and_beside_plain_prompts(caches: Caches, engine: Engine) -> None:
    check_edges(caches, engine)
    for layout in map(caches.layout, EDGES):
        assert engine.tokens([ticketed(layout)]) == [caches.blended(layout)]


def test_a_plain_prompt_after_a_blended_one_of_the_same_tokens(caches: Caches, engine: Engine) -> None:
    layout = caches.layout(3 * BLOCK + 9)  # its context ends where a block does
    text = LayoutTicket(layout).text()
    assert engine.tokens([(layout, text, "salted")]) == [caches.blended(layout)]
    assert engine.tokens([(layout, None, None)]) == [caches.full(layout)]
    assert engine.tokens([(layout, None, "salted")]) == [caches.blended(layout)], "its blocks, for its like"


@pytest.mark.parametrize("rows", [BLOCK + 1, 300])
def test_a_load_that_fails_is_computed_by_vllm(caches: Caches, engine: Engine, rows: int) -> None:
    """Five of five answers were wrong in vLLM's second runner after a failed synchronous load."""
    fails, good = caches.layout(rows, FAILS), caches.layout(rows)
    full, blended = caches.full(fails), caches.blended(good)
    assert engine.tokens([ticketed(fails)]) == [full]
    several = [ticketed(fails), ticketed(good), ticketed(fails), (good, None, None)]
    assert engine.tokens(several) == [full, blended, full, caches.full(good)]
    assert engine.figures(ticketed(fails))["reason"] == "failed"


def test_parameters_that_are_no_tickets_of_the_prompt(caches: Caches, engine: Engine) -> None:
    layout = caches.layout(300)
    of_another = LayoutTicket(PromptLayout.of_chunks((1,), ((2, 3),), (4,))).text()
    asked = [(layout, nonsense, "salt") for nonsense in ({"kvblend": 1}, of_another)]
    assert engine.tokens(asked) == [caches.full(layout)] * 2


def test_one_prompt_after_another_the_shortest_first(caches: Caches, engine: Engine) -> None:
    """So eight that come together do not all wait for the last."""
    names = [engine.add(ticketed(caches.layout(rows))) for rows in (630, BLOCK + 1, 300)]
    outputs = list[str]()
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs += [output.request_id for output in engine.llm.llm_engine.step()]
    assert [names.index(name) for name in dict.fromkeys(outputs)] == [1, 2, 0]


def test_a_request_that_is_cancelled_while_it_waits_or_loads(caches: Caches, engine: Engine) -> None:
    layout, other = caches.layout(630), caches.layout(300)
    running = engine.llm.llm_engine
    for steps in (0, 1, 2):
        names = [engine.add(ticketed(one)) for one in (layout, other)]
        for _ in range(steps):
            running.step()
        running.abort_request(names)
        while running.has_unfinished_requests():
            running.step()
    engine.idle()
    scheduler = running.engine_core.engine_core.scheduler
    assert scheduler.kv_cache_manager.usage == 0
    assert engine.tokens([ticketed(layout)]) == [caches.blended(layout)]


@pytest.mark.parametrize("rows", [4 * BLOCK + 9, BLOCK + 9], ids=["three quarters", "all but the question"])
def test_what_vllms_prefix_cache_covers_is_left_to_it(
    caches: Caches, engine: Engine, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = caches.layout(rows)
    ticket = ticketed(layout)
    first = engine.tokens([ticket])
    monkeypatch.setattr(RowBlender, "blending", None)
    [output] = engine.outputs([ticket])
    assert list(output.outputs[0].token_ids) == first[0]
    figures = output.kv_transfer_params["kvblend"]
    assert figures == {"rows": layout.rows, "rows_reused": rows - 9, "rows_computed": 9}
