"""KV copied into two workers that share a model: each takes its heads, and the answers are those of kvblend's own decoding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from offline import COUNT, FAILS, LATE, Engine, salt, started
from tiny import Bench, bench, save_model

from blend.types import PromptLayout

pytestmark = pytest.mark.inside_vllm
LENGTHS = (128, 300)


def check_answers(held: Bench, engine: Engine) -> None:
    layouts = [held.layout(rows, rows) for rows in LENGTHS]
    full, blends = [held.full(layout, COUNT) for layout in layouts], [held.blended(layout, 0.15) for layout in layouts]
    expected = [held.greedy(blend, COUNT) for blend in blends]
    assert all(found != wanted for found, wanted in zip(expected, full, strict=True))  # or nothing could be seen
    plain = [(layout, None, None) for layout in layouts]
    assert engine.tokens([(one.layout, held.hold(one), salt()) for one in blends] + plain) == expected + full


def test_a_head_that_both_workers_have(tmp_path: Path) -> None:
    model = save_model(tmp_path / "tiny", num_key_value_heads=1)
    with bench(model) as held, started(model, held.socket, load="sync", tensor_parallel_size=2) as engine:
        check_answers(held, engine)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(save_model(tmp_path_factory.mktemp("tiny"))) as found:
        yield found


@pytest.fixture(scope="module")
def engine(held: Bench) -> Iterator[Engine]:
    with started(held.model, held.socket, module="ranks_connector", tensor_parallel_size=2) as found:
        yield found


def ending(layout: PromptLayout, token: int) -> PromptLayout:
    return replace(layout, suffix=(*layout.suffix[:-1], token))


def test_each_worker_takes_its_heads(held: Bench, engine: Engine) -> None:
    check_answers(held, engine)


def test_one_worker_is_late(held: Bench, engine: Engine) -> None:
    blend = held.blended(ending(held.layout(300, 1), LATE), 0.15)
    other = held.blended(held.layout(128, 2), 0.15)
    asked = [(one.layout, held.hold(one), salt()) for one in (blend, other)]
    assert engine.tokens(asked) == [held.greedy(one, COUNT) for one in (blend, other)]


def test_what_fails_in_one_worker_is_computed_in_all(held: Bench, engine: Engine) -> None:
    blend = held.blended(ending(held.layout(300, 3), FAILS), 0.15)
    full = held.full(blend.layout, COUNT)
    assert held.greedy(blend, COUNT) != full
    assert engine.tokens([(blend.layout, held.hold(blend), salt())]) == [full]
