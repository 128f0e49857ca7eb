"""Tools through the chat templates of three families."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from served import Served
from tool_rooms import ASKED, CITY, FAMILIES, WEATHER
from tool_templates import SPECIAL
from transformers import AutoTokenizer


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
