"""JSON schemas that take long, much memory or no end are refused at once, and hold up no other request."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from changing import until
from served import CHAT, Served
from tool_rooms import FAMILIES, WEATHER

from blend.serve.forms import schemas

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
FIELD = "response_format.json_schema.schema"
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


def numbers(count: int, first: int) -> dict[str, Any]:
    """Integers whose multiples need a state for each remainder."""
    multiples = {f"n{number}": {"type": "integer", "multipleOf": first + number} for number in range(count)}
    return {"type": "object", "properties": multiples, "required": [*multiples], "additionalProperties": False}


def patterns(count: int, begin: str = "a") -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^{begin}{number}_": {} for number in range(count)}}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "pairs of patterns": (patterns(1500), "more than 1 s"),
    "multiples": (numbers(20, 499_979), "more than (1 s|128 MB)"),
    "long constant": ({"const": "x" * 20_000}, "a text has 20,000 characters"),
    "long pattern": ({"type": "string", "pattern": "x" * 20_000}, "a text has 20,000 characters"),
    "long enumeration": ({"enum": [f"{number:08000d}" for number in range(20)]}, "characters of JSON"),
    "optional properties": (
        {"properties": {f"n{n}": {"type": "integer"} for n in range(1000)}},
        "too large|4007 items",
    ),
    "reference to itself": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no answer has this form"),
    "endless reference": ({"$ref": "#/$defs/node", "$defs": {"node": ENDLESS}}, "too large to follow"),
}


def formed(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    return {**HELLO, "response_format": form, **fields}


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_with_the_reason(listen: Callable[..., Served], name: str) -> None:
    schema, reason = HOSTILE[name]
    url = f"{listen().url}{CHAT}"
    response = httpx.post(url, json=formed(schema), timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, FIELD), response.text
    assert re.search(reason, error["message"]), error["message"]


def test_the_parameters_of_a_strict_function(served_tools: Callable[[str], Served]) -> None:
    function = {"name": "list_places", "strict": True, "parameters": {"properties": {"a": numbers(20, 499_979)}}}
    tools = [WEATHER, {"type": "function", "function": function}]
    response = httpx.post(f"{served_tools(FAMILIES[0]).url}{CHAT}", json={**HELLO, "tools": tools}, timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[1].function.parameters")


def test_others_are_answered_meanwhile(served: Served) -> None:
    with ThreadPoolExecutor(12) as pool:

        def ask(number: int) -> int:
            return httpx.post(
                f"{served.url}{CHAT}", json=formed(patterns(1500, f"a{number}x")), timeout=120
            ).status_code

        hostile = [pool.submit(ask, number) for number in range(10)]
        until(lambda: served.state.forms.running == 1)
        assert httpx.post(f"{served.url}{CHAT}", json=HELLO, timeout=60).status_code == 200
        assert not all(answer.done() for answer in hostile)
        assert {answer.result() for answer in hostile} == {400}


def checks() -> list[psutil.Process]:
    """The processes that check schemas now."""
    children = psutil.Process().children()
    return [child for child in children if child.is_running() and "blend.serve.forms.schemas" in child.cmdline()]


def test_a_schema_is_checked_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[str](), schemas.start_process

    def counted(module: str, task: bytes) -> Any:
        started.append(module)
        return start(module, task)

    monkeypatch.setattr(schemas, "start_process", counted)
    body = formed({"type": "object", "maxProperties": 1, "title": "Once"})
    for _ in range(3):
        assert httpx.post(f"{served.url}{CHAT}", json=body, timeout=60).status_code == 200
    assert len(started) == 1


def test_a_server_that_stops_ends_what_it_checks(serve: Callable[..., Served]) -> None:
    served = serve()
    with ThreadPoolExecutor(12) as pool:

        def ask(number: int) -> tuple[int, str]:
            response = httpx.post(f"{served.url}{CHAT}", json=formed(patterns(1500, f"a{number}x")), timeout=120)
            return response.status_code, response.json()["error"]["code"]

        hostile = [pool.submit(ask, number) for number in range(6)]
        until(lambda: served.state.forms.running == 1 and len(served.server.server_state.tasks) == 6)
        served.stop()
        served.ended()
        codes = [answer.result() for answer in hostile]
    assert {(503, "shutting_down")} <= set(codes) <= {(503, "shutting_down"), (400, "invalid_value")}
    assert codes.count((503, "shutting_down")) >= 3
    assert not checks()
