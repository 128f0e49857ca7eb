"""Engines in processes of their own: with few blocks, in small batches, and with two workers that share the heads."""

from collections.abc import Iterator

import pytest
from loads_proof import EDGES, Caches, ticketed
from offline import Engine
from rows_connector import FAILS
from rows_proof import STEPS

MANY = 120  # tokens of an answer


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    return Caches(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def two_workers(caches: Caches) -> Iterator[Engine]:
    with caches.engine(tensor_parallel_size=2, max_num_seqs=8) as engine:
        yield engine


def test_two_workers_choose_the_same_rows_and_each_writes_its_heads(caches: Caches, two_workers: Engine) -> None:
    layouts = [caches.layout(rows) for rows in EDGES]
    mixed = [*map(ticketed, layouts), *((layout, None, None) for layout in layouts)]
    assert two_workers.tokens(mixed, STEPS) == [*map(caches.blended, layouts), *map(caches.full, layouts)]


def test_what_fails_in_one_worker_is_computed_by_both(caches: Caches, two_workers: Engine) -> None:
    fails, good = caches.layout(300, FAILS), caches.layout(300)
    answers = two_workers.tokens([ticketed(fails), ticketed(good), ticketed(fails)], STEPS)
    assert answers == [caches.full(fails), caches.blended(good), caches.full(fails)]


def test_too_few_blocks(caches: Caches) -> None:
    """Requests are preempted, and their KV is loaded again."""
    layouts = [caches.layout(rows) for rows in (300, 410, 517)]
    with caches.engine(num_gpu_blocks_override=14, disable_log_stats=False) as engine:
        blended = [tokens[:STEPS] for tokens in engine.tokens([ticketed(layout) for layout in layouts * 2], MANY)]
        metrics = {metric.name: getattr(metric, "value", 0) for metric in engine.llm.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0
    assert blended == [caches.blended(layout) for layout in layouts] * 2


def test_in_batches_of_160_tokens(caches: Caches) -> None:
    layouts = [caches.layout(rows) for rows in EDGES]
    with caches.engine(max_num_batched_tokens=160, max_num_seqs=8) as engine:
        mixed = [*map(ticketed, layouts), *((layout, None, None) for layout in layouts)]
        answers = engine.tokens(mixed, STEPS)
    assert answers == [*map(caches.blended, layouts), *map(caches.full, layouts)]
