"""Calls of functions in answers, cut at every place."""

import json

import pytest
from tool_templates import TEMPLATES

from blend.serve.forms.tool_calls import GENERIC, HERMES, LLAMA, MISTRAL, CallFormat, CallParser, format_of
from blend.serve.http.chat import MessageBody
from blend.serve.request import ToolCall

NAMES = ("weather", "search")
PARIS = ("weather", {"city": "Paris"})
BERLIN = ("weather", {"city": 'Ber"lin}', "days": [1, {"a": None}]})
J_PARIS, J_BERLIN = (json.dumps({"name": name, "arguments": given}) for name, given in (PARIS, BERLIN))
P_PARIS, P_BERLIN = (text.replace('"arguments"', '"parameters"') for text in (J_PARIS, J_BERLIN))
TRICKY = ("search", {"q": "</tool_call> [TOOL_CALLS] é <tool_call>"})
J_TRICKY = json.dumps({"name": TRICKY[0], "arguments": TRICKY[1]}, ensure_ascii=False)
UNNAMED = '<tool_call>{"name": "the weather", "arguments": {}}</tool_call>'

CASES: list[tuple[CallFormat, str, list[object]]] = [
    (HERMES, f"I look.\n\n<tool_call>\n{J_PARIS}\n</tool_call>\n<tool_call>{J_BERLIN}</tool_call>", ["I look.", PARIS, BERLIN]),
    (HERMES, f"<tool_call>{J_TRICKY}</tool_call>", [TRICKY]),
    (HERMES, f"<tool_call>\n{J_PARIS}", [PARIS]),
    (HERMES, f"<tool_call>\n{J_PARIS}\n</tool", [PARIS]),
    (HERMES, f"<tool_call>\n{J_PARIS}\n</tool_call>\nDone.", [PARIS, "Done."]),
    (HERMES, '<tool_call>\n{"name": "weather"}\n</tool_call>', [("weather", {})]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', [PARIS]),
    (HERMES, '<tool_call>{"name": "search", "arguments": {"q": "a\nb"}}</tool_call>', [("search", {"q": "a\nb"})]),
    (HERMES, f"<tool_call>{{'name': 1}} oh dear</tool_call> <tool_call>{J_PARIS}</tool_call>",
     ["<tool_call>{'name': 1} oh dear</tool_call>", PARIS]),
    (HERMES, '<tool_call>{"name": "weather", "arg', ['<tool_call>{"name": "weather", "arg']),
    (HERMES, "a < b <tool_ca", ["a < b <tool_ca"]),
    (HERMES, J_PARIS, [PARIS]),
    (HERMES, f"\n```json\n{J_PARIS}\n```\n{J_BERLIN}", [PARIS, BERLIN]),
    (HERMES, '```json\n{"a": 1}\n```', ['```json\n{"a": 1}\n```']),
    (HERMES, "```js\nlet a = 1\n```", ["```js\nlet a = 1\n```"]),
    (HERMES, " plain text \n", [" plain text \n"]),
    (HERMES, "", []),
    (HERMES, UNNAMED, [UNNAMED]),
    (MISTRAL, f"[TOOL_CALLS] [{J_PARIS}, {J_BERLIN}]", [PARIS, BERLIN]),
    (MISTRAL, f"Yes. [TOOL_CALLS][{J_TRICKY}]", ["Yes.", TRICKY]),
    (MISTRAL, "[TOOL_CALLS] nothing of the sort", ["[TOOL_CALLS] nothing of the sort"]),
    (LLAMA, P_PARIS, [PARIS]),
    (LLAMA, f"\n{P_PARIS}; {P_BERLIN}", [PARIS, BERLIN]),
    (LLAMA, f"<|python_tag|>{P_PARIS}", [PARIS]),
    (LLAMA, '{"name": "unknown", "parameters": {}}', ['{"name": "unknown", "parameters": {}}']),
    (LLAMA, '{"a": 1} {"name": "weather", "parameters": {}}', ['{"a": 1} {"name": "weather", "parameters": {}}']),
    (LLAMA, f"Text first: {P_PARIS}", [f"Text first: {P_PARIS}"]),
    (LLAMA, '<|python_tag|>print("hello, world")', ['<|python_tag|>print("hello, world")']),
    (GENERIC, f"[{J_PARIS}, {J_BERLIN}]", [PARIS, BERLIN]),
    (GENERIC, "[1] says so [2]", ["[1] says so [2]"]),
    (GENERIC, "[[[[", ["[[[["]),
    (GENERIC, '{"answer": 42}', ['{"answer": 42}']),
]  # fmt: skip


def parsed(form: CallFormat, pieces: list[str], *, parallel: bool = True) -> list[object]:
    """Calls, and the text between them in one piece."""
    parser = CallParser(form, NAMES, parallel=parallel)
    found: list[object] = []
    for one in [*(one for text in pieces for one in parser.add(text)), *parser.finish()]:
        if isinstance(one, ToolCall):
            assert len(one.id) == 9
            found.append((one.name, json.loads(one.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += one
        else:
            found.append(one)
    return found


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_calls_wherever_the_stream_is_cut(form: CallFormat, text: str, expected: list[object]) -> None:
    assert parsed(form, [text]) == parsed(form, list(text)) == expected
    calls = [place for place, one in enumerate(expected, 1) if isinstance(one, tuple)]
    for wanted in ([text], list(text)):
        assert parsed(form, wanted, parallel=False) == expected[: calls[0] if calls else None], "one call"
    for at in range(len(text)):
        assert parsed(form, [text[:at], text[at:]]) == expected, text[:at]
    for step in (3, 7):
        assert parsed(form, [text[at : at + step] for at in range(0, len(text), step)]) == expected


CUT = {
    HERMES: ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    MISTRAL: ("[TOOL_CALLS] [", ", ", "]"),
    LLAMA: ("", "", ""),
}


@pytest.mark.parametrize("form", CUT, ids=("hermes", "mistral", "llama"))
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_required_calls_that_are_cut_short(form: CallFormat, step: int) -> None:
    """Wherever the answer ends, it is calls: the first ones whole, the last one up to there."""
    begin, between, end = CUT[form]
    arguments, head = '{"city": "Paris", "note": "a } \\" [x"}', f'{{"name": "weather", "{form.arguments}": '
    several = (arguments, arguments) if between else (arguments,)
    text = begin + between.join(f"{head}{one}}}" for one in several) + end
    for length in range(len(text) + 1):
        parser, written = CallParser(form, NAMES, required=True), text[:length]
        pieces = [one for at in range(0, length, step) for one in parser.add(written[at : min(at + step, length)])]
        found = [*pieces, *parser.finish()]
        assert all(isinstance(one, ToolCall) and one.name == "weather" for one in found), written
        given = [one.arguments for one in found if isinstance(one, ToolCall)]
        expected = [one[: len(arguments)] for one in written.split(head)[1:]]
        assert given == [one for one in expected if one], written


@pytest.mark.parametrize("value", ["[" * 100_000, "1" * 10_000], ids=["nested", "long"])
def test_arguments_that_cannot_be_decoded(value: str) -> None:
    """They are text, or where a call is required what there is of one."""
    required, arguments = CallParser(HERMES, NAMES, required=True), f'{{"city": {value}'
    assert required.add(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}') == []
    assert [one.arguments for one in required.finish() if isinstance(one, ToolCall)] == [arguments]
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}{value.replace("[", "]")}}}}}</tool_call>'
    assert parsed(HERMES, [text]) == [text]


@pytest.mark.parametrize(
    "arguments",
    [
        *('{"x": NaN}', '{"x": [-Infinity]}', '{"x": 1e999}'),
        *(r'{"x": "\ud800"}', r'{"\udc00": 1}', r'"{\"x\": NaN}"', f'{{"x": {"[" * 300}{"]" * 300}}}'),
    ],
)
@pytest.mark.parametrize("form", [HERMES, GENERIC])
def test_arguments_that_could_not_come_back_are_text(form: CallFormat, arguments: str) -> None:
    call = f'{{"name": "weather", "arguments": {arguments}}}'
    for written in (call, f"[{call}, {J_PARIS}]"):
        text = f"{form.begin}{written}{form.end}"
        assert parsed(form, [text]) == parsed(form, list(text)) == [text]


@pytest.mark.parametrize(
    "arguments", ["{}", r'{"x": "\ud83d\ude00 \u0000"}', '{"x": "a\nb", "y": 1e300}', '{"x": 1, "x": 2}']
)
def test_what_is_given_out_as_arguments_is_taken_back(arguments: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    (call,) = CallParser(HERMES, NAMES).add(text)
    assert isinstance(call, ToolCall)
    function = {"name": call.name, "arguments": call.arguments}
    back = MessageBody.model_validate({"role": "assistant", "tool_calls": [{"id": call.id, "function": function}]})
    assert back.tool_calls[0].function.arguments == call.arguments


def test_text_is_not_held_back_longer_than_it_may_be_a_call() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.add("The answer <") == ["The answer"]
    assert parser.add("b>") == [" <b>"]
    assert parser.add(" is <tool_call") == [" is"]
    assert parser.add(">{") == []


def test_the_form_of_calls_comes_from_the_template() -> None:
    assert [format_of(TEMPLATES[name]) for name in ("qwen", "llama", "mistral")] == [HERMES, LLAMA, MISTRAL]
    assert format_of({"default": "{{ messages }}", "tool_use": TEMPLATES["qwen"]}) == HERMES
    assert format_of(None) == format_of("{% for tool in tools %}") == GENERIC
