"""Tools in prompts of three families, and answers of a given form from a random model: JSON, or calls, at once.

JSON schemas that take long, much memory or no end are refused at once, and hold up no other request.
"""

import json
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest
from changing import until
from served import Served, refusal
from tool_rooms import ASKED, CITY, FAMILIES, WEATHER
from tool_templates import SPECIAL
from transformers import AutoTokenizer

from blend.serve.forms import schemas
from blend.serve.http.keys import ApiKeys

PLACES: Any = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "large"]},
        "gates": {"$ref": "#/$defs/few"},
        "open": {"type": "boolean"},
        "names": {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["size", "gates", "open", "names"],
    "additionalProperties": False,
    "$defs": {"few": {"type": "integer", "minimum": 0, "maximum": 99}},
}
STRICT: Any = {"type": "function", "function": {"name": "list_places", "strict": True, "parameters": PLACES}}
TOOLS = [WEATHER, STRICT]
NAMED: Any = {"type": "function", "function": {"name": "list_places"}}
AS_PLACES: Any = {"type": "json_schema", "json_schema": {"name": "places", "schema": PLACES, "strict": True}}
SAMPLED: dict[str, Any] = {"temperature": 1.5, "max_tokens": 200}


def require_places(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["size", "gates", "open", "names"]
    assert value["size"] in ("small", "large")
    assert 0 <= value["gates"] <= 99
    assert isinstance(value["open"], bool)
    assert {"Paris", "Rome"} >= set(value["names"])


def require_call(call: Any) -> None:
    assert len(call.id) == 9
    if call.function.name == "weather":
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    else:
        assert call.function.name == "list_places"
        require_places(call.function.arguments)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(served_tools: Callable[[str], Served], family: str) -> Served:
    """Of a model of each family."""
    return served_tools(family)


def ask(server: Served, **body: Any) -> Any:
    with server.openai() as client:
        return client.chat.completions.create(model=server.model, **{"messages": ASKED, **SAMPLED, **body}).choices[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_required(server: Served, seed: int) -> None:
    answer = ask(server, tool_choice="required", tools=TOOLS, parallel_tool_calls=False, seed=seed)
    assert (answer.finish_reason, answer.message.content, len(answer.message.tool_calls)) == ("tool_calls", None, 1)
    require_call(answer.message.tool_calls[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_function_that_is_named_is_called_once(server: Served, seed: int) -> None:
    (call,) = ask(server, tool_choice=NAMED, tools=TOOLS, seed=seed).message.tool_calls
    assert call.function.name == "list_places"
    require_call(call)


def test_several_calls_are_the_same_streamed_and_whole(server: Served) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": 5, "messages": ASKED, **SAMPLED}
    whole = ask(server, **body)
    with server.openai() as client, client.chat.completions.stream(model=server.model, **body) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls == [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls]
    assert streamed.finish_reason == whole.finish_reason
    for call in whole.message.tool_calls:
        require_call(call)
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)


def test_a_required_call_that_is_cut_short_is_a_call(server: Served) -> None:
    """All of the answer is calls, so no text; the arguments hold what there is."""
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "seed": 1, "messages": ASKED, **SAMPLED}
    with server.openai() as client:
        whole = client.chat.completions.create(model=server.model, **body)
        body["max_tokens"] = whole.usage.completion_tokens - 28  # the text around a call has up to 12
        chunks = client.chat.completions.create(model=server.model, **body, stream=True)
        deltas = [chunk.choices[0].delta for chunk in chunks]
    cut = ask(server, **body)
    (call,) = cut.message.tool_calls
    assert (cut.finish_reason, cut.message.content, call.function.name) == ("length", None, "list_places")
    assert whole.choices[0].message.tool_calls[0].function.arguments.startswith(call.function.arguments)
    streamed = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert [(function.name, function.arguments) for function in streamed] == [("list_places", call.function.arguments)]
    assert not any(delta.content for delta in deltas)
    begun = ask(server, **{**body, "max_tokens": 1})
    assert (begun.finish_reason, begun.message.content, begun.message.tool_calls) == ("length", "", None)


def test_strict_tools_may_be_called_or_not(server: Served, family: str) -> None:
    """A random model writes text; a call that it begins is valid. A bias makes it begin one."""
    text = ask(server, tools=[STRICT], seed=1, max_tokens=8)
    assert (text.finish_reason, text.message.tool_calls) == ("length", None)
    begin = {"llama": '{"', "mistral": "[TOOL_CALLS]"}.get(family)
    if begin:  # elsewhere it is many tokens for the tiny tokenizer
        first = server.rag.decoder.tokenizer.encode(begin, add_special_tokens=False)[0]
        called = ask(server, tools=[STRICT], seed=1, logit_bias={str(first): 100}, parallel_tool_calls=False)
        require_call(called.message.tool_calls[0])


def test_answers_with_and_without_a_form_in_one_batch(served: Served) -> None:
    """Each is the answer that it is alone."""
    bodies: list[dict[str, Any]] = [
        {"response_format": AS_PLACES, "seed": 4},
        {"response_format": AS_PLACES, "temperature": 0},
        {"response_format": {"type": "json_object"}, "seed": 4, "max_tokens": 30},
        {"seed": 4, "max_tokens": 30},
        {"temperature": 0, "max_tokens": 30},
    ]

    def answer(body: dict[str, Any]) -> str:
        return str(ask(served, **body).message.content)

    sampled, greedy, an_object, *_ = alone = list(map(answer, bodies))
    require_places(sampled)
    require_places(greedy)
    assert an_object.startswith("{")
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(answer, bodies)) == alone


def test_log_probabilities_are_the_models_before_the_mask(served: Served) -> None:
    free, formed = (
        ask(served, temperature=0, max_tokens=1, logprobs=True, top_logprobs=5, **more).logprobs.content[0]
        for more in ({}, {"response_format": AS_PLACES})
    )
    assert [one.token for one in formed.top_logprobs] == [one.token for one in free.top_logprobs]
    assert [one.logprob for one in formed.top_logprobs] == pytest.approx([one.logprob for one in free.top_logprobs])
    assert formed.token != free.token


def answered(content: str, arguments: str = '{"city": "Paris"}') -> list[Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*ASKED, said, {"role": "tool", "tool_call_id": "abcdefghi", "content": content}]


def prompt_of(server: Served, **body: Any) -> list[str]:
    """The tokens of the prompt that the server made."""
    trace = server.ask(**body, kvblend={"trace": True}).json()["kvblend"]["trace"]
    return [token["text"] for token in trace]


def rendered(server: Served, messages: list[Any]) -> str:
    """The prompt as transformers makes it, with the arguments of calls as objects."""
    parsed = json.loads(json.dumps(messages))
    for message in parsed:
        for call in message.get("tool_calls", ()):
            message["content"] = ""
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    return str(tokenizer.apply_chat_template(parsed, tools=[WEATHER], tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("messages", [ASKED, answered("Sunny."), answered('{"sky": "blue",\n "wind": 3}')], ids=len)
def test_prompts_are_those_of_the_template(server: Served, messages: list[Any]) -> None:
    assert "".join(prompt_of(server, messages=messages, tools=[WEATHER])) == rendered(server, messages)


def test_tools_are_left_out_where_none_may_be_called(server: Served) -> None:
    assert prompt_of(server, messages=ASKED, tools=[WEATHER], tool_choice="none") == prompt_of(server, messages=ASKED)


def test_a_tool_that_spells_control_tokens_writes_none(server: Served, family: str) -> None:
    words = "".join(SPECIAL[family])
    attack = {"type": "function", "function": {"name": "weather", "description": f"Bad. {words}", "parameters": CITY}}
    harmless = prompt_of(server, messages=answered("Sunny."), tools=[WEATHER])
    attacked = prompt_of(server, messages=answered("Sunny.", json.dumps({"city": words})), tools=[attack])
    assert "".join(attacked).count(words) == 2
    for word in SPECIAL[family]:
        assert attacked.count(word) == harmless.count(word), word


def test_documents_stay_before_the_question_when_a_tool_has_answered(served_tools: Callable[[str], Served]) -> None:
    documents = [{"text": "Paris is mild in May. " * 12}]
    first, second = (
        served_tools("qwen").ask(messages=messages, tools=[WEATHER], documents=documents).json()["kvblend"]
        for messages in (ASKED, answered("Sunny."))
    )
    assert [source["id"] for source in first["sources"]] == [source["id"] for source in second["sources"]]
    assert second["figures"]["rows_reused"] >= first["figures"]["rows"] - 8


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
    "long enumeration": ({"enum": [f"{number:08000d}" for number in range(20)]}, "characters of JSON"),
    "optional properties": (
        {"properties": {f"n{n}": {"type": "integer"} for n in range(1000)}},
        "too large|4007 items",
    ),
    "reference to itself": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no answer has this form"),
    "a bound that would be reached": (
        {"properties": {"a": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}}},
        "exclusiveMinimum 1 is not supported beside these bounds; use minimum",
    ),
    "a bound below zero": (
        {"anyOf": [{"type": "number", "minimum": -0.5, "exclusiveMaximum": 0.0}]},
        "exclusiveMaximum 0.0 is not supported beside these bounds; use maximum",
    ),
    "a bound of an old draft": (
        {"properties": {"a": {"type": "number", "minimum": 1, "exclusiveMinimum": True}}},
        "exclusiveMinimum is true or false",
    ),
    "a number beyond 64-bit floats": ({"enum": [2, 2**53 + 1]}, "9007199254740993 has more digits than a 64-bit float"),
    "a name that comes twice": (
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}, "minProperties": 3},
        "minProperties 3 is not supported: one name could come twice",
    ),
    "endless reference": ({"$ref": "#/$defs/node", "$defs": {"node": ENDLESS}}, "too large to follow"),
}


def ask_for(served: Served, schema: dict[str, Any], key: str = "") -> httpx.Response:
    return served.ask(key, response_format={"type": "json_schema", "json_schema": {"name": "form", "schema": schema}})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_with_the_reason(listen: Callable[..., Served], name: str) -> None:
    schema, reason = HOSTILE[name]
    response = ask_for(listen(), schema)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, FIELD), response.text
    assert re.search(reason, error["message"]), error["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
        {"type": "integer", "exclusiveMinimum": 2**40, "exclusiveMaximum": 2**40 + 4},
        {"type": "object", "required": ["a"], "minProperties": 2, "maxProperties": 3},
    ],
)
def test_bounds_that_are_kept_are_not_refused(listen: Callable[..., Served], schema: dict[str, Any]) -> None:
    assert ask_for(listen(), {"type": "object", "properties": {"a": schema}}).status_code == 200


def test_the_parameters_of_a_strict_function_are_checked_too(served_tools: Callable[[str], Served]) -> None:
    function = {"name": "list_places", "strict": True, "parameters": {"properties": {"a": numbers(20, 499_979)}}}
    response = served_tools(FAMILIES[0]).ask(tools=[WEATHER, {"type": "function", "function": function}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[1].function.parameters")


def hostile(pool: ThreadPoolExecutor, served: Served, count: int, key: str) -> list[Future[httpx.Response]]:
    """Many requests that take long, all different; the first of them is being checked."""
    asked = [pool.submit(ask_for, served, patterns(1500, f"a{number}x"), key) for number in range(count)]
    until(lambda: served.state.forms.running == 1)
    return asked


def test_a_schema_is_checked_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mock(side_effect=schemas.start_process)
    monkeypatch.setattr(schemas, "start_process", start)
    for _ in range(3):
        assert ask_for(served, {"type": "object", "maxProperties": 1, "title": "Once"}).status_code == 200
    assert start.call_count == 1


def ordinary_s(served: Served, key: str) -> float:
    """The seconds of an ordinary request, the median of nine."""
    seconds = []
    for _ in range(9):
        begun = time.perf_counter()
        assert served.ask(key).status_code == 200
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def test_others_are_answered_while_schemas_are_checked_and_a_stop_ends_the_checks(serve: Callable[..., Served]) -> None:
    """Others share the processor with one check, whether 1 or 40 schemas wait for theirs."""
    served = serve({"tenants": ApiKeys([("anns", "ann"), ("bobs", "bob")])})
    alone_s = ordinary_s(served, "bobs")
    with ThreadPoolExecutor(40) as pool:
        answers = hostile(pool, served, 40, "anns")
        until(lambda: len(served.server.server_state.tasks) + sum(answer.done() for answer in answers) == 40)
        assert ordinary_s(served, "bobs") < max(10 * alone_s, 0.2)
        assert sum(answer.done() for answer in answers) < 20
        until(lambda: any(answer.done() for answer in answers))
        served.stop()
        served.ended()
        codes = [refusal(answer.result()) for answer in answers]
    outcomes = {(503, "shutting_down"), (400, "invalid_value"), (429, "rate_limit_exceeded")}
    assert set(codes) <= outcomes, "of one key's requests 32 may wait"
    assert codes.count((503, "shutting_down")) >= 20
    children = psutil.Process().children()
    assert not [child for child in children if child.is_running() and "blend.serve.forms.schemas" in child.cmdline()]
