"""OpenAI's Responses API, with the real client."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from served import Served
from tool_rooms import ASKED, CITY, FAMILIES, chat_text
from tool_rooms import WEATHER as CHAT_WEATHER

QUESTION = "The weather in Paris?"
WEATHER: Any = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY}
ONE_CALL: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


def test_an_answer_is_that_of_chat_completions(served: Served, client: openai.OpenAI) -> None:
    said: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": QUESTION},
    ]
    first = client.responses.create(model=served.model, input=QUESTION, instructions="Be brief.", max_output_tokens=12)
    longer = client.responses.create(model=served.model, input=said, max_output_tokens=12)
    assert first.output_text == chat_text(served, ASKED)
    said[0] = {"role": "user", "content": "Hello."}
    assert longer.output_text == chat_text(served, said)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (first.usage.output_tokens, first.usage.total_tokens) == (12, first.usage.input_tokens + 12)
    assert first.instructions == "Be brief."
    assert first.kvblend["figures"]["rows"] == first.usage.input_tokens


def test_the_events_of_a_stream(served: Served, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": served.model, "input": QUESTION, "max_output_tokens": 12}
    whole, events = client.responses.create(**body), list(client.responses.create(**body, stream=True))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert len(deltas) > 3
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == 12


def test_items_that_are_cut_short_are_incomplete(served: Served, served_tools: Callable[[str], Served]) -> None:
    tools = served_tools("llama")
    for place, more, most, kind in ((served, {}, 12, "message"), (tools, ONE_CALL, 200, "function_call")):
        body: dict[str, Any] = {"model": place.model, "input": QUESTION, **more}
        with place.openai() as client:
            body["max_output_tokens"] = client.responses.create(**body, max_output_tokens=most).usage.output_tokens - 5
            whole, events = client.responses.create(**body), list(client.responses.create(**body, stream=True))
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [(item.type, item.status) for item in whole.output] == [(kind, "incomplete")]
        assert [(item.type, item.status) for item in done] == [(kind, "incomplete")]


def test_log_probabilities_are_those_of_chat_completions(served: Served, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": served.model, "input": QUESTION, "max_output_tokens": 12}
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole, events = client.responses.create(**body), list(client.responses.create(**body, stream=True))
    asked: Any = {"messages": ASKED[1:], "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    expected = client.chat.completions.create(model=served.model, **asked).choices[0].logprobs.content
    deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert (len(expected), whole.top_logprobs) == (12, 3)
    for told in (whole.output[0].content[0].logprobs, deltas, done.logprobs):
        assert [one.model_dump() for one in told] == [one.model_dump() for one in expected]
    assert events[-1].response.output[0].content == whole.output[0].content


def test_json_of_a_schema(served: Served, client: openai.OpenAI) -> None:
    class Place(BaseModel):
        open: bool
        gates: int

    asked: dict[str, Any] = {"model": served.model, "input": QUESTION, "max_output_tokens": 100, "temperature": 1.5}
    answer = client.responses.parse(text_format=Place, extra_body={"seed": 3}, **asked)
    assert isinstance(answer.output_parsed, Place)
    assert answer.status == "completed"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_is_called_and_its_result_sent_back(served_tools: Callable[[str], Served], family: str) -> None:
    served = served_tools(family)
    with served.openai() as client:
        more: dict[str, Any] = {"model": served.model, "temperature": 1.5, "max_output_tokens": 200, **ONE_CALL}
        more["extra_body"] = {"seed": 1}
        said: list[Any] = [{"role": "user", "content": QUESTION}]
        answer = client.responses.create(input=said, **more)
        with client.responses.stream(input=said, **more) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        (call,) = answer.output
        assert (call.type, call.name, answer.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        assert [(one.name, one.arguments) for one in streamed.output] == [(call.name, call.arguments)]
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == [call.arguments]
        said += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
        last = client.responses.create(model=served.model, input=said, tools=[WEATHER], max_output_tokens=12)
    result = {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."}
    function = {"name": call.name, "arguments": call.arguments}
    called = {"id": call.call_id, "type": "function", "function": function}
    messages = [said[0], {"role": "assistant", "content": None, "tool_calls": [called]}, result]
    assert last.output_text == chat_text(served, messages, tools=[CHAT_WEATHER])
    assert last.usage.input_tokens > answer.usage.input_tokens


ALONE: list[tuple[str, Any]] = [
    *(("previous_response_id", "resp_1"), ("store", True), ("background", True), ("conversation", "conv_1"), ("n", 2)),
    *(("top_logprobs", 3), ("tools", [{"type": "web_search"}]), ("tools", [WEATHER]), ("messages", []), ("input", [])),
    *(("tools", [{"type": "mcp", "server_label": "x", "server_url": "y"}]), ("max_output_tokens", 0)),
    ("tool_choice", {"type": "function", "name": "f"}),
]
WRONG = [
    *(({name: value}, name) for name, value in ALONE),
    ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
    ({"include": ["everything"]}, "include[0]"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:50])
def test_what_is_wrong_is_told_by_its_place(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/responses", json={"input": QUESTION, "max_output_tokens": 2, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert param.split(".")[0].split("[")[0] in error["message"]


def test_what_asks_for_nothing_is_taken(http: httpx.Client) -> None:
    nothing = {
        "store": False,
        "previous_response_id": None,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": None},
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "parallel_tool_calls": True,
    }
    response = http.post("/v1/responses", json={"input": QUESTION, "max_output_tokens": 2, **nothing})
    assert response.status_code == 200, response.text


def test_a_stream_that_has_begun_ends_with_its_error(serve: Callable[..., Served]) -> None:
    served = serve(http={"grace_s": 0.0})
    with served.openai() as client:
        stream = client.responses.create(model=served.model, input=QUESTION, max_output_tokens=3000, stream=True)
        next(event for event in stream if event.type == "response.output_text.delta")
        served.stop()
        *_, last = stream
    assert (last.type, last.response.error.code) == ("response.failed", "shutting_down")
