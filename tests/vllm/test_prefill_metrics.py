"""What `blend vllm` tells operators: the counters, and the page that shows them to this machine alone."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from blend.errors import ConfigError
from blend.integrations.vllm.desk import Desk, Question
from blend.integrations.vllm.metrics import MetricsPage, PrefillMetrics
from blend.integrations.vllm.shelf import Shelf
from blend.serve.metrics import Metrics
from blend.serve.types import Failed, Figures, Finished, QueueFullError, Started


def opened(reason: str = "", method: Any = "blend") -> Started:
    rows = {"rows": 100, "rows_computed": 20, "rows_reused": 5, "rows_inexact": 0}
    found = {"hits": 3, "chunks": 4, "bytes_loaded": 777, "missing": 1, "notes": ()}
    times: dict[str, Any] = {
        "stages": {},
        "waited_s": 0.1,
        "ttft_s": 0.3,
        "full_estimated_s": None,
        "full_measured_s": None,
    }
    return Started(Figures(method=method, reason=reason, **rows, **found, **times))


def values(page: bytes) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in page.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines if "_created" not in name}


def question(metrics: PrefillMetrics, shelf: Any) -> tuple[Question, list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    return Question(shelf, told.append, metrics), told


def test_a_prompt_that_is_handed_over_is_counted_with_its_rows_and_bytes() -> None:
    metrics, shelf = PrefillMetrics(), SimpleNamespace(put=lambda *_: "t", size=lambda ticket: 4096)
    mine, told = question(metrics, shelf)
    mine.hold(SimpleNamespace(cache=None, layout=SimpleNamespace(token_ids=())), "salt")  # type: ignore[arg-type]
    mine.on_reply(opened())
    mine.on_reply(Finished("stop"))
    assert "ready" in told[0]
    found = values(metrics.page())
    wanted = {
        "prompts_blended_total": 1,
        "rows_prompt_total": 100,
        "rows_recomputed_total": 20,
        'chunk_hits_total{tier="store"}': 3,
        "chunk_misses_total": 1,
        "bytes_loaded_total": 777,
        "handed_over_bytes_total": 4096,
        "handover_seconds_count": 1,
        "handover_seconds_sum": 0.3,
    }
    assert {name: found[f"kvblend_{name}"] for name in wanted} == wanted
    assert not any("fallbacks_total{" in name for name in found)


@pytest.mark.parametrize(
    ("replies", "counted"),
    [
        ([opened("nothing to reuse", "full"), Finished("stop")], "nothing to reuse"),
        ([opened(), Finished("stop")], "busy"),  # no room on the shelf
        ([Failed(RuntimeError("a fault"))], "failed"),
        ([Finished("deadline")], "deadline"),
        ([Finished("cancelled")], ""),  # its client has gone
        ([opened("", "full"), Finished("stop")], ""),  # as was asked for
    ],
)
def test_a_prompt_that_is_left_to_vllm_is_counted_by_its_reason(replies: list[Any], counted: str) -> None:
    metrics = PrefillMetrics()
    mine, told = question(metrics, Shelf(1))
    for one in replies:
        mine.on_reply(one)
    assert "plain" in told[0]
    assert [name for name in values(metrics.page()) if "fallbacks_total{" in name] == (
        [f'kvblend_fallbacks_total{{reason="{counted}"}}'] if counted else []
    )


def test_damaged_entries_are_counted() -> None:
    metrics = PrefillMetrics()
    mine, _ = question(metrics, Shelf(1))
    mine.on_reply(opened()._replace(problems=("damaged",) * 3))
    assert values(metrics.page())["kvblend_damaged_entries_total"] == 3


def desk(error: Exception) -> Desk:
    def fails() -> None:
        raise error

    decoder = SimpleNamespace(rotations=(), dtype=SimpleNamespace(itemsize=4), fingerprint="m")
    room = SimpleNamespace(rag=lambda: SimpleNamespace(decoder=decoder))
    engine = SimpleNamespace(require_room=fails, holding=lambda: None)
    return Desk(SimpleNamespace(room=lambda tenant: room, engine=engine, stores=()), Shelf(4096))  # type: ignore[arg-type]


def test_failures_are_counted_by_kind_and_what_is_held_is_shown() -> None:
    failing, full = desk(RuntimeError("a fault")), desk(QueueFullError(3, 1.0))
    failing.ask({}, lambda message: None)
    full.ask({}, lambda message: None)
    assert values(failing.page())['kvblend_errors_total{kind="internal_error"}'] == 1
    found = values(full.page())
    assert found['kvblend_fallbacks_total{reason="busy"}'] == 1
    assert (found["kvblend_held_prompts"], found["kvblend_held_budget_bytes"]) == (0, 4096)


def test_what_both_servers_count_has_one_name() -> None:
    def names(metrics: Any) -> set[str]:
        return set(re.findall(r"^# TYPE (\S+)", metrics.page().decode(), re.M))

    mine, theirs = names(PrefillMetrics()), names(Metrics())
    only_mine = {"handover_seconds", "handed_over_bytes_total", "fetches_total", *HELD}
    assert {name for name in mine - theirs if not name.endswith("_created")} == {
        f"kvblend_{name}" for name in only_mine
    }


HELD = ("held_prompts", "held_bytes", "held_budget_bytes")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0"])
def test_the_page_is_there_for_this_machine(address: str) -> None:
    with MetricsPage.at(address) as page:
        page.serve(lambda: b"kvblend_x 1\n")
        got = httpx.get(page.url)
        assert (got.status_code, got.text) == (200, "kvblend_x 1\n")
        assert got.headers["content-type"].startswith("text/plain")
        assert httpx.get(page.url.replace("/metrics", "/other")).status_code == 404
        assert httpx.get(page.url, headers={"host": "rebound.example"}).status_code == 403
        assert httpx.post(page.url).status_code == 501
    with pytest.raises(httpx.ConnectError):
        httpx.get(page.url)


@pytest.mark.parametrize(
    "address", ["9400", ":9400", "127.0.0.1", "127.0.0.1:x", "0.0.0.0:9400", "192.0.2.1:1", "a@::1"]
)
def test_other_addresses_are_refused_in_a_line(address: str) -> None:
    with pytest.raises(ConfigError, match="--metrics"), MetricsPage.at(address):
        pass


def test_an_address_in_use_is_refused_in_a_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"), MetricsPage.at(f"127.0.0.1:{taken.getsockname()[1]}"):
            pass
