"""Engines in processes of their own: with few blocks, in small batches, and with two workers that share the heads."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from caches import SETTINGS, Caches, prompt, tiny_caches
from layouts import marked
from loads_proof import check_edges
from machines import until
from offline import COUNT, Engine, ticketed
from rows_connector import FAILS

MANY = 120  # tokens of an answer


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    return tiny_caches(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def two_workers(caches: Caches) -> Iterator[Engine]:
    with closing(caches.engine(tensor_parallel_size=2)) as engine:
        yield engine


def test_two_workers_choose_the_same_rows_and_each_writes_its_heads(caches: Caches, two_workers: Engine) -> None:
    check_edges(caches, two_workers)


def test_what_fails_in_one_worker_is_computed_by_both(caches: Caches, two_workers: Engine) -> None:
    fails, good = caches.layout(300, FAILS), caches.layout(300)
    answers = two_workers.tokens([ticketed(fails), ticketed(good), ticketed(fails)])
    assert answers == [caches.full(fails), caches.blended(good), caches.full(fails)]


def test_two_workers_learn_what_a_prompt_missed(caches: Caches, two_workers: Engine, tmp_path: Path) -> None:
    """The first one stores caches of all heads, which are those that kvblend's decoder computes."""
    layout, own = prompt(401), tiny_caches(tmp_path)
    assert two_workers.figures(ticketed(layout))["reason"] == "cold"
    until(lambda: not caches.missing(layout), 100)
    assert two_workers.tokens([ticketed(layout)]) == [own.blended(own.layout(401))]


def test_two_workers_share_text_of_prompts_that_come_together(caches: Caches, tmp_path: Path) -> None:
    """The first one decides and stores, both compute; then each chooses the same rows. One prompt may come a step before."""
    first, longer = prompt(402), prompt(402)
    layouts = [marked(first, new=range(4)), marked(replace(longer, suffix=(7, *longer.suffix)), new=range(4))]
    options = {"store": str(caches.folder / "store"), "codec": "native", **SETTINGS}
    with closing(Engine(caches.model, options, tensor_parallel_size=2)) as engine:
        outputs = engine.outputs([ticketed(layout, (1, 1, 1, 1)) for layout in layouts])
    shown = [output.kv_transfer_params["kvblend"] for output in outputs]
    rows = sum(map(len, first.chunks))
    assert [(each["rows_ahead"], each["rows_shared"]) for each in shown] == [(rows, rows), (0, rows)]
    own = tiny_caches(tmp_path)
    own.layout(402)
    learned = [marked(layout, learned=range(4)) for layout in layouts]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [own.blended(layout) for layout in learned]


def test_too_few_blocks(caches: Caches) -> None:
    """Requests are preempted, and their KV is loaded again."""
    layouts = [caches.layout(rows) for rows in (300, 410, 517)]
    with closing(caches.engine(num_gpu_blocks_override=14, max_num_seqs=16, disable_log_stats=False)) as engine:
        blended = [tokens[:COUNT] for tokens in engine.tokens([ticketed(layout) for layout in layouts * 2], MANY)]
        metrics = {metric.name: getattr(metric, "value", 0) for metric in engine.llm.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0
    assert blended == [caches.blended(layout) for layout in layouts] * 2


def test_in_batches_of_160_tokens(caches: Caches) -> None:
    with closing(caches.engine(max_num_batched_tokens=160)) as engine:
        check_edges(caches, engine)
