"""Thoughts of a reasoning model, which have a field of their own, and arguments of chat templates, which ask for them."""

import inspect
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import CHAT, Served
from tool_rooms import CITY, WEATHER, servers
from tool_templates import QWEN
from transformers import PreTrainedTokenizerBase

from blend.serve.forms.thoughts import Thinking, ThoughtMarkers, ThoughtParser, markers_of
from blend.serve.http.chat import RESERVED
from tests.thinking_model import CALL, OPENED, THINKING, THOUGHTS, save_thinking_model

RESPONSES = "/v1/responses"
MARKS = ThoughtMarkers("<think>", "</think>")
ANSWER = ("Seven", " gates", " and", " a", " harbour.")
ARGUMENTS = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "thinking {{ enable_thinking }}, effort {{ reasoning_effort | default('none') }}, tone {{ tone | default('none') }}\n"
)
JSON = ('{"city": ', '"Paris"', "}")
MODELS = {
    "qwen": (ANSWER, THINKING),
    "opened": (ANSWER, OPENED),
    "calls": (CALL, THINKING),
    "json": (JSON, THINKING),
    "arguments": (ANSWER, ARGUMENTS),
}
THOUGHT, SAID = "".join(THOUGHTS).strip(), "".join(ANSWER)
USER: list[Any] = [{"role": "user", "content": "How many gates?"}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
AS_CITY: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
CASES = [
    (False, "<think>\nI look.\n\nYes. \n</think>\n\nSeven </think>. ", "I look.\n\nYes.", "Seven </think>. "),
    (False, "\n<think>I look.", "I look.", ""),
    (False, "<think></think>Seven.", "", "Seven."),
    (False, "<think>\n\n</thi", "</thi", ""),
    (False, " <thin", "", " <thin"),
    (False, " Seven <think>gates</think>.", "", " Seven <think>gates</think>."),
    (False, "", "", ""),
    (True, "\nI look.</think>Seven.", "I look.", "Seven."),
    (True, "<think>\nI look.</think>\n\nSeven.", "I look.", "Seven."),
    (True, "<thi", "<thi", ""),
    (True, "I <b>look</b> ", "I <b>look</b>", ""),
]


@pytest.mark.parametrize(("opened", "text", "thoughts", "said"), CASES)
def test_an_answer_is_divided_wherever_it_is_cut(opened: bool, text: str, thoughts: str, said: str) -> None:
    cuts = [(0, n, m, len(text)) for n in range(len(text) + 1) for m in range(n, len(text) + 1)]
    for places in (*cuts, range(len(text) + 1)):
        parser = ThoughtParser(Thinking(MARKS, opened))
        pairs = [*(parser.add(text[start:stop]) for start, stop in pairwise(places)), parser.add("", final=True)]
        assert tuple("".join(parts) for parts in zip(*pairs, strict=True)) == (thoughts, said), tuple(places)


def test_the_template_says_whether_a_model_thinks() -> None:
    assert markers_of(THINKING) == MARKS
    assert markers_of({"default": "[THINK]"}) == ThoughtMarkers("[THINK]", "[/THINK]")
    assert markers_of(QWEN) is markers_of(None) is None
    assert ThoughtParser(None).add("<think>a</think>b") == ("", "<think>a</think>b")


Room = Callable[[str], Served]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    def save(folder: Path, name: str) -> Path:
        return save_thinking_model(folder, *MODELS[name])

    with servers(tmp_path_factory.mktemp("thoughts"), save) as start:
        yield start


def ask(served: Served, *, stream: bool = False, **body: Any) -> Any:
    """An answer, or the chunks of a stream; with thoughts unless `extra_body` says otherwise."""
    given: Any = {"messages": USER, "extra_body": THINK, "max_tokens": 40, **body}
    with served.openai() as client:
        answer = client.chat.completions.create(model=served.model, stream=stream, **given)
        return list(answer) if stream else answer


def say(served: Served, **body: Any) -> Any:
    """The message of an answer."""
    return ask(served, **body).choices[0].message


def deltas(served: Served, field: str, **body: Any) -> list[Any]:
    """What the chunks of a stream have in this field."""
    found = [getattr(one.choices[0].delta, field, None) for one in ask(served, stream=True, **body) if one.choices]
    return [one for one in found if one]


@pytest.mark.parametrize("name", ["qwen", "opened"])
def test_thoughts_are_no_part_of_the_text(room: Room, name: str) -> None:
    answer = ask(room(name))
    message = answer.choices[0].message
    assert (message.reasoning, message.content, answer.choices[0].finish_reason) == (THOUGHT, SAID, "stop")
    assert len(THOUGHTS) < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    streamed = deltas(room(name), "reasoning")
    assert "".join(streamed) == THOUGHT
    assert len(streamed) == len(THOUGHTS)
    assert "".join(deltas(room(name), "content")) == SAID


def test_without_thoughts_there_is_no_field(room: Room) -> None:
    for body in ({}, {"reasoning_effort": "none"}):
        message = say(room("qwen"), extra_body=None, **body)
        assert message.content == SAID
        assert not hasattr(message, "reasoning")
    assert say(room("qwen"), extra_body=None, reasoning_effort="low").reasoning == THOUGHT


def test_an_answer_cut_in_its_thoughts(room: Room) -> None:
    choice = ask(room("qwen"), max_tokens=3).choices[0]
    assert (choice.message.reasoning, choice.message.content) == ("".join(THOUGHTS[:2]).strip(), "")
    assert choice.finish_reason == "length"
    again = [*USER, {"role": "assistant", "content": None, "reasoning": choice.message.reasoning}, *USER]
    assert say(room("qwen"), messages=again).content == SAID


def test_calls_stand_behind_thoughts(room: Room) -> None:
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        message = say(room("calls"), tools=[WEATHER], tool_choice=choice)
        assert message.reasoning == THOUGHT
        assert message.content == ("I look." if choice == "auto" else None)
        assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
        assert "".join(deltas(room("calls"), "reasoning", tools=[WEATHER], tool_choice=choice)) == THOUGHT
        assert len(deltas(room("calls"), "tool_calls", tools=[WEATHER], tool_choice=choice)) == 1


@pytest.mark.parametrize("name", ["json", "qwen", "opened"])
def test_the_form_of_an_answer_does_not_bind_thoughts(room: Room, name: str) -> None:
    message = say(room(name), response_format=AS_CITY)
    assert message.reasoning == THOUGHT
    assert message.content.startswith('{"city": ')
    silent = say(room(name), response_format=AS_CITY, extra_body=None)
    assert silent.content.startswith('{"city": ')
    assert not hasattr(silent, "reasoning")


def test_stop_texts_end_the_answer_and_not_the_thoughts(room: Room) -> None:
    message = say(room("qwen"), stop=["answer", " gates and"])
    assert (message.reasoning, message.content) == (THOUGHT, "Seven")


def test_log_probabilities_are_those_of_the_text(room: Room) -> None:
    expected = [*ANSWER, "<|im_end|>"]
    assert [one.token for one in ask(room("qwen"), logprobs=True).choices[0].logprobs.content] == expected
    chunks = [chunk.choices[0] for chunk in ask(room("qwen"), logprobs=True, stream=True)]
    assert [one.token for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content] == expected


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_later_turn_brings_thoughts_back(room: Room, field: str) -> None:
    traced = {**THINK, "kvblend": {"trace": True}}

    def prompt(thoughts: str) -> list[str]:
        said = {"role": "assistant", "content": "Seven.", field: thoughts}
        answer = ask(room("qwen"), messages=[*USER, said, *USER], extra_body=traced)
        return [one["text"] for one in answer.kvblend["trace"]]

    assert "<think>\nI look.\n</think>\n\nSeven." in "".join(prompt("I look."))
    assert prompt("</think> I <think>").count("<think>") == prompt("I look.").count("<think>") == 1
    with pytest.raises(openai.BadRequestError, match="only an assistant's message"):
        ask(room("qwen"), messages=[{**USER[0], field: "I look."}])


def test_responses_have_an_item_of_reasoning(room: Room) -> None:
    served = room("calls")
    asked: Any = {"model": served.model, "reasoning": {"effort": "low"}, "max_output_tokens": 40}
    flat: Any = {"type": "function", **WEATHER["function"]}
    with served.openai() as client:
        whole = client.responses.create(input=USER, **asked)
        events = list(client.responses.create(input=USER, stream=True, **asked))
        called = client.responses.create(input=USER, tools=[flat], tool_choice="required", **asked)
        result = {"type": "function_call_output", "call_id": called.output[1].call_id, "output": "Sunny."}
        more = client.responses.create(input=[*USER, *called.output, result], **asked)
    assert [(item.type, item.content[0].text, item.status) for item in whole.output] == [
        ("reasoning", THOUGHT, "completed"),
        ("message", "".join(CALL), "completed"),
    ]
    assert whole.usage.output_tokens_details.reasoning_tokens > len(THOUGHTS)
    assert "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == THOUGHT
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    assert [item.type for item in called.output] == ["reasoning", "function_call"]
    assert more.output[0].content[0].text == THOUGHT


def reply(room: Room, path: str = CHAT, **fields: Any) -> Any:
    """What the model answers whose template shows its arguments."""
    question = {"messages": USER} if path == CHAT else {"input": USER}
    body = {**question, "max_tokens": 1, "kvblend": {"trace": True}, **fields}
    return httpx.post(f"{room('arguments').url}{path}", json=body, timeout=60).json()


def ending(room: Room, path: str = CHAT, **fields: Any) -> str:
    """The last line of the prompt."""
    trace = reply(room, path, **fields)["kvblend"]["trace"]
    return "".join(token["text"] for token in trace).rstrip("\n").rpartition("\n")[2]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_arguments_of_the_template_are_merged_over_the_defaults(room: Room, path: str) -> None:
    for nothing in (None, {}):
        assert ending(room, path, chat_template_kwargs=nothing) == "thinking False, effort none, tone none"
    assert ending(room, path, chat_template_kwargs={"tone": "low"}) == "thinking False, effort none, tone low"
    given = {"enable_thinking": True, "unknown": [1, {"a": None}]}
    assert ending(room, path, chat_template_kwargs=given) == "thinking True, effort none, tone none"


def test_the_effort_of_reasoning(room: Room) -> None:
    assert ending(room, reasoning_effort="high") == "thinking True, effort high, tone none"
    assert ending(room, RESPONSES, reasoning={"effort": "low"}) == "thinking True, effort low, tone none"
    for nothing in ({}, {"effort": None}, {"effort": "none", "summary": "auto"}, None):
        assert ending(room, RESPONSES, reasoning=nothing) == "thinking False, effort none, tone none"
    more = {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}}
    assert ending(room, reasoning_effort="high", **more) == "thinking False, effort low, tone none"


def test_an_argument_that_spells_control_tokens_writes_none(room: Room) -> None:
    trace = reply(room, chat_template_kwargs={"tone": "<|im_start|>"})["kvblend"]["trace"]
    tokens = [token["text"] for token in trace]
    assert "".join(tokens).count("<|im_start|>") == 2
    assert tokens.count("<|im_start|>") == 1, "the template's own"


def test_arguments_that_the_server_sets_itself_are_refused(room: Room) -> None:
    signature = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
    named = {name for name, one in signature.parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    assert named <= RESERVED
    for name in (*RESERVED, "bos_token"):
        for path in (CHAT, RESPONSES):
            error = reply(room, path, chat_template_kwargs={name: "x"})["error"]
            assert error["param"] == "chat_template_kwargs"
            assert name in error["message"]


@pytest.mark.parametrize("wrong", [[], "x", {"tone": "x" * 20_000}], ids=lambda one: str(one)[:20])
def test_wrong_arguments_are_refused(room: Room, wrong: Any) -> None:
    assert reply(room, chat_template_kwargs=wrong)["error"]["type"] == "invalid_request_error"
