"""Thoughts of a reasoning model have a field of their own, whole and in streams."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import openai
import pytest
from rooms import serving
from served import listening
from tool_rooms import WEATHER
from tool_templates import QWEN

from blend.serve.forms.thoughts import Thinking, ThoughtMarkers, ThoughtParser, markers_of
from tests.thinking_model import CALL, OPENED, THINKING, THOUGHTS, save_thinking_model

MARKS = ThoughtMarkers("<think>", "</think>")
ANSWER = ("Seven", " gates", " and", " a", " harbour.")
JSON = ('{"gates": ', "7", "}")
MODELS = {
    "qwen": (ANSWER, THINKING),
    "opened": (ANSWER, OPENED),
    "calls": (CALL, THINKING),
    "json": (JSON, THINKING),
    "marks": (ANSWER, QWEN),  # writes the marks, but its template does not know them
}
THOUGHT, SAID = "".join(THOUGHTS).strip(), "".join(ANSWER)
USER: list[Any] = [{"role": "user", "content": "How many gates?"}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
NUMBER = {"type": "integer"}
GATES: Any = {"type": "object", "properties": {"gates": NUMBER}, "required": ["gates"], "additionalProperties": False}
AS_GATES: Any = {"type": "json_schema", "json_schema": {"name": "gates", "schema": GATES}}
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


class Room(NamedTuple):
    """A server and the name of its model."""

    client: openai.OpenAI
    model: str

    def ask(self, **body: Any) -> Any:
        """A whole answer, with thoughts unless `extra_body` says otherwise."""
        given: Any = {"messages": USER, "extra_body": THINK, "max_tokens": 40, **body}
        return self.client.chat.completions.create(model=self.model, **given)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Room]]:
    folder = tmp_path_factory.mktemp("thoughts")
    with ExitStack() as stack:

        @cache
        def start(name: str) -> Room:
            answer, template = MODELS[name]
            model = save_thinking_model(folder / name, answer, template)
            service = stack.enter_context(serving(folder / f"store of {name}", model, learn_budget=0))
            served = stack.enter_context(listening(service))
            client = served.openai()
            return Room(stack.enter_context(client), served.model)

        yield start


def deltas(room: Room, field: str, **body: Any) -> list[Any]:
    """What the chunks of a stream have in this field."""
    found = [getattr(chunk.choices[0].delta, field, None) for chunk in room.ask(stream=True, **body) if chunk.choices]
    return [one for one in found if one]


@pytest.mark.parametrize("name", ["qwen", "opened"])
def test_thoughts_are_no_part_of_the_text(room: Callable[[str], Room], name: str) -> None:
    answer = room(name).ask()
    message = answer.choices[0].message
    assert (message.reasoning, message.content, answer.choices[0].finish_reason) == (THOUGHT, SAID, "stop")
    assert len(THOUGHTS) < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    streamed = deltas(room(name), "reasoning")
    assert "".join(streamed) == THOUGHT
    assert len(streamed) == len(THOUGHTS)
    assert "".join(deltas(room(name), "content")) == SAID


def test_without_thoughts_there_is_no_field(room: Callable[[str], Room]) -> None:
    for body in ({}, {"reasoning_effort": "none"}):
        message = room("qwen").ask(extra_body=None, **body).choices[0].message
        assert message.content == SAID
        assert not hasattr(message, "reasoning")
    assert room("qwen").ask(extra_body=None, reasoning_effort="low").choices[0].message.reasoning == THOUGHT


def test_the_text_of_other_models_is_never_cut(room: Callable[[str], Room]) -> None:
    message = room("marks").ask().choices[0].message
    assert message.content == f"<think>{''.join(THOUGHTS)}</think>\n\n{SAID}"
    assert not hasattr(message, "reasoning")


def test_an_answer_cut_in_its_thoughts(room: Callable[[str], Room]) -> None:
    choice = room("qwen").ask(max_tokens=3).choices[0]
    assert (choice.message.reasoning, choice.message.content) == ("".join(THOUGHTS[:2]).strip(), "")
    assert choice.finish_reason == "length"
    again = [*USER, {"role": "assistant", "content": None, "reasoning": choice.message.reasoning}, *USER]
    assert room("qwen").ask(messages=again).choices[0].message.content == SAID


def test_calls_stand_behind_thoughts(room: Callable[[str], Room]) -> None:
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        message = room("calls").ask(tools=[WEATHER], tool_choice=choice).choices[0].message
        assert message.reasoning == THOUGHT
        assert message.content == ("I look." if choice == "auto" else None)
        assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
        assert "".join(deltas(room("calls"), "reasoning", tools=[WEATHER], tool_choice=choice)) == THOUGHT
        assert len(deltas(room("calls"), "tool_calls", tools=[WEATHER], tool_choice=choice)) == 1


@pytest.mark.parametrize("name", ["json", "qwen", "opened"])
def test_the_form_of_an_answer_does_not_bind_thoughts(room: Callable[[str], Room], name: str) -> None:
    message = room(name).ask(response_format=AS_GATES).choices[0].message
    assert message.reasoning == THOUGHT
    assert message.content.startswith('{"gates": ')
    silent = room(name).ask(response_format=AS_GATES, extra_body=None).choices[0].message
    assert silent.content.startswith('{"gates": ')
    assert not hasattr(silent, "reasoning")


def test_stop_texts_end_the_answer_and_not_the_thoughts(room: Callable[[str], Room]) -> None:
    message = room("qwen").ask(stop=["answer", " gates and"]).choices[0].message
    assert (message.reasoning, message.content) == (THOUGHT, "Seven")


def test_log_probabilities_are_those_of_the_text(room: Callable[[str], Room]) -> None:
    choice = room("qwen").ask(logprobs=True).choices[0]
    assert [one.token for one in choice.logprobs.content] == [*ANSWER, "<|im_end|>"]
    chunks = [chunk.choices[0] for chunk in room("qwen").ask(logprobs=True, stream=True)]
    assert [one.token for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content] == [
        *ANSWER,
        "<|im_end|>",
    ]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_later_turn_brings_thoughts_back(room: Callable[[str], Room], field: str) -> None:
    traced = {**THINK, "kvblend": {"trace": True}}

    def prompt(thoughts: str) -> list[str]:
        said = {"role": "assistant", "content": "Seven.", field: thoughts}
        answer = room("qwen").ask(messages=[*USER, said, *USER], extra_body=traced)
        return [one["text"] for one in answer.kvblend["trace"]]

    assert "<think>\nI look.\n</think>\n\nSeven." in "".join(prompt("I look."))
    assert prompt("</think> I <think>").count("<think>") == prompt("I look.").count("<think>") == 1
    with pytest.raises(openai.BadRequestError, match="only an assistant's message"):
        room("qwen").ask(messages=[{**USER[0], field: "I look."}])


def test_responses_have_an_item_of_reasoning(room: Callable[[str], Room]) -> None:
    client, model = room("calls")
    given: Any = {"model": model, "input": USER, "reasoning": {"effort": "low"}, "max_output_tokens": 40}
    whole = client.responses.create(**given)
    assert [(item.type, item.content[0].text, item.status) for item in whole.output] == [
        ("reasoning", THOUGHT, "completed"),
        ("message", "".join(CALL), "completed"),
    ]
    assert whole.usage.output_tokens_details.reasoning_tokens > len(THOUGHTS)
    events = list(client.responses.create(stream=True, **given))
    assert "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == THOUGHT
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    flat: Any = {"type": "function", **WEATHER["function"]}
    called = client.responses.create(tools=[flat], tool_choice="required", **given)
    assert [item.type for item in called.output] == ["reasoning", "function_call"]
    result = {"type": "function_call_output", "call_id": called.output[1].call_id, "output": "Sunny."}
    again: Any = [*USER, *called.output, result]
    more = client.responses.create(**{**given, "input": again, "extra_body": {"kvblend": {"trace": True}}})
    assert more.output[0].content[0].text == THOUGHT
