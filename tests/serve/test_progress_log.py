"""The log says how far a long prefill is, and nothing of short ones."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from cases import cache_chunks, make_layout
from engines import MakeEngine, ask
from served import logged

from blend.config import BlendConfig
from blend.serve.engine import progress
from blend.serve.engine.progress import ProgressLog
from blend.serve.failures import LOG


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What is logged."""
    records = list[dict[str, Any]]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(logged(record))

    handler = Handler()
    level = LOG.level
    LOG.setLevel(logging.INFO)  # clears what the logger remembers of its level
    LOG.addHandler(handler)
    yield records
    LOG.removeHandler(handler)
    LOG.setLevel(level)


def test_a_line_every_ten_seconds(lines: list[dict[str, Any]]) -> None:
    now = 0.0
    log = ProgressLog("abc", 1200, clock=lambda: now)
    for second in range(1, 26):
        now = float(second)
        log.update(40 * second, 1000)
    told = [{name: value for name, value in line.items() if name not in ("time", "level")} for line in lines]
    of_prompt = {"event": "prefill", "id": "abc", "prompt": 1200, "of": 1000, "rows_s": 40.0}
    assert told == [{**of_prompt, "computed": 400, "left_s": 15}, {**of_prompt, "computed": 800, "left_s": 5}]


def test_the_speed_is_that_of_the_last_rows(lines: list[dict[str, Any]]) -> None:
    now = 0.0
    log = ProgressLog("abc", 1000, clock=lambda: now)
    for now, rows in ((10.0, 500), (20.0, 600), (30.0, 600), (40.0, 1000)):  # noqa: B007
        log.update(rows, 1000)
    assert [line["rows_s"] for line in lines] == [50.0, 10.0, 0.0]
    assert [line.get("left_s") for line in lines] == [10, 40, None], "and nothing of one that is done"


def test_the_engine_says_how_far_a_prompt_is(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]]
) -> None:
    engine = make_engine(pass_rows=16, most_running=2)
    layout = make_layout(chunks=(80, 40)).all_plain()
    ask(engine, layout, id="quick").wait()
    assert not lines
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    answer = ask(engine, layout, id="slow", priority=1).wait()
    assert {(line["event"], line["id"], line["prompt"]) for line in lines} == {("prefill", "slow", layout.rows)}
    assert {line["of"] for line in lines} == {answer.figures.rows_computed}
    computed = [line["computed"] for line in lines]
    assert computed == sorted(set(computed))
    assert len(computed) > 5
    assert computed[-1] < answer.figures.rows_computed


@pytest.mark.parametrize("ratio", [0.2, 0.97])
def test_rows_of_a_blended_prompt_are_counted_with_those_of_its_beginning(
    ratio: float, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]]
) -> None:
    engine = make_engine(pass_rows=8, most_running=2)
    layout = make_layout(chunks=(60, 50, 70), suffix=9)
    cache_chunks(engine.blender, layout)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    answer = ask(engine, layout, id="slow", priority=1, cold=True, config=BlendConfig(ratio=ratio)).wait()
    assert answer.figures.method == "blend"
    assert {line["of"] for line in lines} == {answer.figures.rows_computed}
    assert lines[0]["computed"] == min(6, len(layout.prefix))
    assert answer.figures.rows_computed - lines[-1]["computed"] <= 6
