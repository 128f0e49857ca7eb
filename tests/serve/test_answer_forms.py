"""Tools in prompts of three families, and answers of a given form from a random model: JSON, or calls, at once."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from served import Served
from tool_rooms import ASKED, CITY, FAMILIES, WEATHER
from tool_templates import SPECIAL
from transformers import AutoTokenizer

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
AS_PLACES: Any = {"type": "json_schema", "json_schema": {"name": "places", "schema": PLACES, "strict": True}}
SAMPLED: dict[str, Any] = {"temperature": 1.5, "max_tokens": 200}


def require_places(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["size", "gates", "open", "names"]
    assert value["size"] in ("small", "large")
    assert 0 <= value["gates"] <= 99
    assert isinstance(value["open"], bool)
    assert {"Paris", "Rome"} >= set(value["names"])


def ask(served: Served, **body: Any) -> Any:
    with served.openai() as client:
        return client.chat.completions.create(model=served.model, **{"messages": ASKED, **SAMPLED, **body}).choices[0]


def require_call(call: Any) -> None:
    assert len(call.id) == 9
    assert call.type == "function"
    if call.function.name == "weather":
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    else:
        assert call.function.name == "list_places"
        require_places(call.function.arguments)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_required(served_tools: Callable[[str], Served], family: str, seed: int) -> None:
    body: dict[str, Any] = {"tools": [WEATHER, STRICT], "parallel_tool_calls": False, "seed": seed}
    answer = ask(served_tools(family), tool_choice="required", **body)
    assert (answer.finish_reason, answer.message.content, len(answer.message.tool_calls)) == ("tool_calls", None, 1)
    require_call(answer.message.tool_calls[0])
    named = {"type": "function", "function": {"name": "list_places"}}
    named_body = {**body, "parallel_tool_calls": None}  # a function that is named is called once
    chosen = ask(served_tools(family), tool_choice=named, **named_body).message.tool_calls
    assert [call.function.name for call in chosen] == ["list_places"]
    require_call(chosen[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls_are_the_same_streamed_and_whole(served_tools: Callable[[str], Served], family: str) -> None:
    served = served_tools(family)
    body: dict[str, Any] = {"tools": [WEATHER, STRICT], "tool_choice": "required", "seed": 5, "messages": ASKED}
    whole = ask(served, **body)
    with served.openai() as client, client.chat.completions.stream(model=served.model, **SAMPLED, **body) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0]
    said = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert said == [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls]
    assert streamed.finish_reason == whole.finish_reason
    for call in whole.message.tool_calls:
        require_call(call)
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_that_is_cut_short_is_a_call(served_tools: Callable[[str], Served], family: str) -> None:
    """All of the answer is calls, so no text; the arguments hold what there is."""
    served = served_tools(family)
    named: Any = {"type": "function", "function": {"name": "list_places"}}
    body: dict[str, Any] = {"tools": [WEATHER, STRICT], "tool_choice": named, "seed": 1, "messages": ASKED}
    asked: dict[str, Any] = {"model": served.model, **SAMPLED, **body}
    with served.openai() as client:
        whole = client.chat.completions.create(**asked)
        asked["max_tokens"] = whole.usage.completion_tokens - 28  # the text around a call has up to 12
        cut = client.chat.completions.create(**asked).choices[0]
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    (call,) = cut.message.tool_calls
    assert (cut.finish_reason, cut.message.content, call.function.name) == ("length", None, "list_places")
    assert whole.choices[0].message.tool_calls[0].function.arguments.startswith(call.function.arguments)
    streamed = [called.function for choice in choices for called in choice.delta.tool_calls or ()]
    assert [(called.name, called.arguments) for called in streamed] == [("list_places", call.function.arguments)]
    assert not any(choice.delta.content for choice in choices)
    begun = ask(served, **{**body, "max_tokens": 1})
    assert (begun.finish_reason, begun.message.content, begun.message.tool_calls) == ("length", "", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_tools_may_be_called_or_not(served_tools: Callable[[str], Served], family: str) -> None:
    """A random model writes text; a call that it begins is valid. A bias makes it begin one."""
    served = served_tools(family)
    text = ask(served, tools=[STRICT], seed=1, max_tokens=8)
    assert (text.finish_reason, text.message.tool_calls) == ("length", None)
    tokenizer = served.state.service.tenant("").rag().decoder.tokenizer
    begin = {"llama": '{"', "mistral": "[TOOL_CALLS]", "qwen": "<tool_call>"}[family]
    first = tokenizer.encode(begin, add_special_tokens=False)
    if family != "qwen":  # there it is many tokens for the tiny tokenizer
        called = ask(served, tools=[STRICT], seed=1, logit_bias={str(first[0]): 100}, parallel_tool_calls=False)
        require_call(called.message.tool_calls[0])


def test_json_of_a_schema(served: Served) -> None:
    for seed in range(3):
        answer = ask(served, response_format=AS_PLACES, seed=seed)
        assert answer.finish_reason == "stop"
        require_places(answer.message.content)
    greedy = ask(served, response_format=AS_PLACES, temperature=0)
    require_places(greedy.message.content)


def test_any_object(served: Served) -> None:
    answer = ask(served, response_format={"type": "json_object"}, seed=1, temperature=0, max_tokens=400)
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


def test_answers_with_and_without_a_form_in_one_batch(served: Served) -> None:
    """Each is the answer that it is alone."""
    bodies: list[dict[str, Any]] = [
        {"response_format": AS_PLACES, "seed": 4},
        {"seed": 4, "max_tokens": 30},
        {"response_format": AS_PLACES, "temperature": 0},
        {"temperature": 0, "max_tokens": 30},
    ]
    alone = [ask(served, **body).message.content for body in bodies]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
            asked = (
                client.chat.completions.create(model=served.model, **{"messages": ASKED, **SAMPLED, **body})
                for body in bodies
            )
            return [str(one.choices[0].message.content) for one in await asyncio.gather(*asked)]

    assert asyncio.run(together()) == alone


def test_log_probabilities_are_the_models_before_the_mask(served: Served) -> None:
    free, formed = (
        ask(served, temperature=0, max_tokens=1, logprobs=True, top_logprobs=5, **more)
        for more in ({}, {"response_format": AS_PLACES})
    )
    top = [
        [(one.token, round(one.logprob, 4)) for one in answer.logprobs.content[0].top_logprobs]
        for answer in (free, formed)
    ]
    assert top[0] == top[1]
    assert formed.logprobs.content[0].token != free.logprobs.content[0].token


def call(arguments: str = '{"city": "Paris"}') -> Any:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def answered(content: str, arguments: str = '{"city": "Paris"}') -> list[Any]:
    said = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    return [*ASKED, said, {"role": "tool", "tool_call_id": "abcdefghi", "content": content}]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(served_tools: Callable[[str], Served], family: str) -> Iterator[openai.OpenAI]:
    with served_tools(family).openai() as made:
        yield made


def prompt_of(client: openai.OpenAI, **body: Any) -> list[str]:
    """The tokens of the prompt that the server made."""
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, max_tokens=1, extra_body={"kvblend": {"trace": True}}, **body
    )
    return [token["text"] for token in answer.kvblend["trace"]]


def rendered(served: Served, messages: list[Any], tools: list[Any] | None = None) -> str:
    """The prompt as transformers makes it, with the arguments of calls as objects."""
    parsed = json.loads(json.dumps(messages))
    for message in parsed:
        if message.get("tool_calls"):
            message["content"] = ""
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    return str(tokenizer.apply_chat_template(parsed, tools=tools, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("messages", [ASKED, answered("Sunny."), answered('{"sky": "blue",\n "wind": 3}')], ids=len)
def test_prompts_are_those_of_the_template(
    served_tools: Callable[[str], Served], client: openai.OpenAI, family: str, messages: list[Any]
) -> None:
    for tools in ([WEATHER], None):
        expected = rendered(served_tools(family), messages, tools)
        assert "".join(prompt_of(client, messages=messages, **({"tools": tools} if tools else {}))) == expected


def test_tools_are_left_out_where_none_may_be_called(client: openai.OpenAI) -> None:
    assert prompt_of(client, messages=ASKED, tools=[WEATHER], tool_choice="none") == prompt_of(client, messages=ASKED)


def test_a_tool_that_spells_control_tokens_writes_none(client: openai.OpenAI, family: str) -> None:
    words = "".join(SPECIAL[family])
    attack = {"type": "function", "function": {"name": "weather", "description": f"Bad. {words}", "parameters": CITY}}
    harmless = prompt_of(client, messages=answered("Sunny."), tools=[WEATHER])
    attacked = prompt_of(client, messages=answered("Sunny.", json.dumps({"city": words})), tools=[attack])
    assert "".join(attacked).count(words) == 2
    for word in SPECIAL[family]:
        assert attacked.count(word) == harmless.count(word), word


def test_documents_stay_before_the_question_when_a_tool_has_answered(served_tools: Callable[[str], Served]) -> None:
    document = {"documents": [{"text": "Paris is mild in May. " * 12}]}
    with served_tools("qwen").openai() as client:
        first, second = (
            client.chat.completions.create(
                model=served_tools("qwen").model, messages=said, tools=[WEATHER], max_tokens=1, extra_body=document
            )
            for said in (ASKED, answered("Sunny."))
        )
    assert [one["id"] for one in first.kvblend["sources"]] == [one["id"] for one in second.kvblend["sources"]]
    assert second.kvblend["figures"]["rows_reused"] >= first.kvblend["figures"]["rows"] - 8
