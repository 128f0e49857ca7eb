"""The rule for fields: what changes the answer is honoured or refused by name, what was only left in a history is accepted."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints
from uuid import uuid4

import anthropic.types as claude_types
import httpx
import pytest
import typing_extensions
from anthropic.types.beta import message_create_params as beta_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from served import CHAT, Served, logged
from tool_rooms import CITY

from blend.serve.failures import LOG
from blend.serve.http.bodies import Body, read_body
from blend.serve.http.chat import ChatBody
from blend.serve.http.errors import ApiError
from blend.serve.http.messages import MessagesBody
from blend.serve.http.responses import ResponsesBody

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 54_000}}
WITHOUT_TEXT = ("image", "container_upload", "redacted_thinking", "browser_state")
ASKED = {"role": "user", "content": "The gate?"}
SAID = {"role": "assistant", "content": "Four."}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (ChatBody, chat_params.CompletionCreateParamsStreaming),
        (ResponsesBody, responses_params.ResponseCreateParamsStreaming),
        (MessagesBody, beta_params.MessageCreateParamsStreaming),
    ],
)
def test_every_field_of_the_clients_is_decided(body: type[Body], params: type) -> None:
    """A new version of a client with a new field fails here, until somebody decides what the field does."""
    known = {*body.names(), *body.unsupported, *body.ignored}
    assert get_type_hints(params).keys() - known == set()


def samples(kind: Any) -> Iterator[Any]:
    """Values of a type of the client: of every member of a union, and with all fields of an object."""
    if get_origin(kind) is Literal:
        yield get_args(kind)[0]
    elif typing_extensions.is_typeddict(kind):
        fields = {name: [*samples(field)] for name, field in get_type_hints(kind).items() if name != "cache_control"}
        first = {name: values[0] if values else None for name, values in fields.items()}
        yield first
        yield from ({**first, name: value} for name, values in fields.items() for value in values[1:])
    elif kind is str:
        yield "Gate 4."
    elif kind in (int, float, bool):
        yield kind(1)
    elif get_origin(kind) in (dict, typing_extensions.Mapping) or kind is dict:
        yield {}
    elif get_origin(kind) is not None and (inner := get_args(kind)):
        for member in inner:
            of_list = str(get_origin(kind)).endswith(("Iterable'>", "SequenceNotStr'>", "list'>"))
            yield from ([value] for value in samples(member)) if of_list else samples(member)


BLOCKS = [
    block
    for message in get_args(claude_types.MessageParam)
    for blocks in samples(get_type_hints(message)["content"])
    if isinstance(blocks, list)
    for block in blocks
    if isinstance(block, dict)
]


def prompt_of(*messages: Any) -> str:
    """The texts of a conversation of the Messages API, as JSON."""
    body = {"messages": messages, "max_tokens": 4, "tools": [{"name": "Gate", "input_schema": CITY}]}
    [prompt] = read_body(json.dumps(body).encode(), MessagesBody).prompts()
    return json.dumps([list(message) for message in prompt["messages"]])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["type"])
def test_a_history_may_hold_any_block(block: dict[str, Any]) -> None:
    if "name" in block:
        block = {**block, "name": "Gate", "input": {"at": "Gate 4."}}
    taken = []
    for role in ("user", "assistant"):
        other = SAID if role == "user" else ASKED
        try:
            taken.append(prompt_of(ASKED, {"role": role, "content": [block]}, other, ASKED))
        except ApiError:
            continue
    assert taken, "of the user or of the assistant"
    has_text = block["type"] not in WITHOUT_TEXT and "is_file_update" not in json.dumps(block)
    assert not has_text or re.search("Gate|invalid_tool_input|unavailable", taken[-1])


def test_there_are_blocks_of_many_types() -> None:
    assert len({block["type"] for block in BLOCKS}) > 15


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (PICTURE, "[picture, 40 KB]"),
        ({"type": "image", "source": {"type": "url", "url": "https://kell/a.png"}}, "[picture, https://kell/a.png]"),
        (
            {"type": "document", "title": "Log", "source": {"type": "base64", "data": "AAAA"}},
            "Log\n\n[document, 3 bytes]",
        ),
        ({"type": "document", "source": {"type": "text", "data": "Gate 4."}}, "Gate 4."),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Gate 4."}]}},
            "Gate 4.",
        ),
        ({"type": "tool_reference", "tool_name": "weather"}, "[tool weather]"),
        (
            {"type": "search_result", "title": "Log", "source": "a.md", "content": [{"type": "text", "text": "x"}]},
            "Log\na.md\nx",
        ),
        ({"type": "input_image", "image_url": "data:image/png;base64,AAAA"}, "[picture, 3 bytes]"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "[picture, 3 bytes]"),
        ({"type": "input_audio", "input_audio": {"data": "A" * 2000, "format": "wav"}}, "[sound, 2 KB]"),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}},
            "[file a.pdf, 3 bytes]",
        ),
        ({"type": "refusal", "refusal": "I may not."}, "I may not."),
        ({"type": "hologram"}, "[hologram]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_part_says_in_all_protocols(part: dict[str, Any], text: str) -> None:
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "Gate", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [part]}
    assert json.dumps(text)[1:-1] in prompt_of(ASKED, called, {"role": "user", "content": [result]})
    earlier = {"role": "user", "content": [part]}
    for kind, field in ((ChatBody, "messages"), (ResponsesBody, "input")):
        raw = json.dumps({field: [earlier, SAID, ASKED]}).encode()
        [prompt] = read_body(raw, kind).prompts()
        assert prompt["messages"][0].content == text


def test_what_cannot_be_read_is_named_in_the_figures_and_refused_in_a_question(http: httpx.Client) -> None:
    pictured = {"role": "user", "content": [{"type": "text", "text": "Look."}, PICTURE]}
    for path, field, more in (
        (CHAT, "messages", {}),
        ("/v1/responses", "input", {}),
        ("/v1/messages", "messages", {"max_tokens": 4}),
    ):
        reply = http.post(path, json={field: [pictured, SAID, ASKED], **more})
        assert reply.status_code == 200, reply.text
        [note] = reply.json()["kvblend"]["figures"]["notes"]
        assert note.endswith("the model reads text alone: picture, 40 KB")
        refused = http.post(path, json={field: [ASKED, SAID, pictured], **more})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message.startswith(f"{field}[2].content")
        assert message.endswith("the model reads text alone, and this is a picture, 40 KB; leave it out")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [ASKED, {"role": "assistant", "content": None}, ASKED]}),
        (CHAT, {"messages": [{**ASKED, "name": "", "tool_call_id": ""}], "min_tokens": 0, "skip_special_tokens": True}),
        (CHAT, {"messages": [ASKED, {**SAID, "tool_calls": [], "content": []}, ASKED]}),
        (CHAT, {"messages": [ASKED, {**SAID, "provider_specific_fields": {}, "reasoning_details": [1]}, ASKED]}),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "e"}}]}
                ]
            },
        ),
        (
            CHAT,
            {"messages": [ASKED, {"role": "assistant", "refusal": "No.", "content": None}, ASKED], "verbosity": "low"},
        ),
        ("/v1/responses", {"input": [ASKED, {**SAID, "type": "message", "phase": "commentary", "id": "m"}, ASKED]}),
        ("/v1/responses", {"input": "x", "client_metadata": {}, "text": {"verbosity": "low"}, "include": []}),
        (
            "/v1/responses",
            {"input": [ASKED, {"type": "web_search_call", "id": "w", "action": {"query": "gate"}}, ASKED]},
        ),
        ("/v1/messages", {"messages": [ASKED], "max_tokens": 2, "metadata": {"user_id": "ada", "team": "x"}}),
        (
            "/v1/messages",
            {
                "messages": [ASKED],
                "max_tokens": 2,
                "system": [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral", "scope": "global"}}],
            },
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_clients_leave_there_is_taken(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    reply = http.post(
        path, json={"max_tokens": 4, **body} if path != "/v1/responses" else {"max_output_tokens": 4, **body}
    )
    assert reply.status_code == 200, reply.text
    verbose = "verbosity" in json.dumps(body)
    assert (
        any(note.startswith("verbosity has no effect") for note in reply.json()["kvblend"]["figures"]["notes"])
        == verbose
    )


def test_arguments_may_be_an_object_and_results_empty() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "gate", "arguments": {"at": 4}}, "provider": "x"}
    messages = [
        ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    [prompt] = read_body(json.dumps({"messages": messages}).encode(), ChatBody).prompts()
    _, said, result = prompt["messages"]
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == [("gate", {"at": 4})]
    assert (result.content, result.name) == ("", "gate")


def test_calls_of_custom_tools_are_calls() -> None:
    called = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "*** Begin"}
    answered = {"type": "custom_tool_call_output", "call_id": "1", "output": "Done."}
    [prompt] = read_body(json.dumps({"input": [ASKED, called, answered]}).encode(), ResponsesBody).prompts()
    _, said, result = prompt["messages"]
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == [("patch", {"input": "*** Begin"})]
    assert (result.content, result.tool_call_id) == ("Done.", "1")


def test_unknown_fields_are_named_once_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    mood, tone = (f"{name}_{uuid4().hex[:8]}" for name in ("mood", "tone"))  # no other test has named them
    message = {**ASKED, mood: 1, "bad name \n": 2, "content": [{"type": "text", "text": "Hi", tone: "x"}]}
    with caplog.at_level(logging.INFO, logger=LOG.name):
        for _ in range(2):
            assert served.ask(messages=[message]).status_code == 200
    lines = [logged(record) for record in caplog.records if record.getMessage() == "field without effect"]
    assert sorted(line["field"] for line in lines) == [f"content.{tone}", f"messages.{mood}"]


def test_json_of_a_schema_in_messages(served: Served, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form, "effort": "max"}}, {"output_format": form}):
        reply = http.post("/v1/messages", json={"messages": [ASKED], "max_tokens": 30, **fields}).json()
        assert [block["text"] for block in reply["content"]] == ['{"a": "x"}']
    wrong = http.post(
        "/v1/messages", json={"messages": [ASKED], "max_tokens": 3, "output_config": {"format": {"type": "xml"}}}
    )
    assert (wrong.status_code, "output_config.format" in wrong.text) == (400, True)


def test_the_effort_of_an_answer_is_that_of_its_thoughts() -> None:
    body = {"messages": [ASKED], "max_tokens": 2, "output_config": {"effort": "max"}}
    for thinking, effort in (("disabled", None), ("adaptive", "xhigh")):
        raw = json.dumps({**body, "thinking": {"type": thinking}}).encode()
        [prompt] = read_body(raw, MessagesBody).prompts()
        assert prompt["template"].get("reasoning_effort") == effort


def test_strict_tools_of_messages_are_strict() -> None:
    tools = [{"name": "gate", "input_schema": CITY, "strict": True, "defer_loading": False, "input_examples": [{}]}]
    [prompt] = read_body(
        json.dumps({"messages": [ASKED], "max_tokens": 2, "tools": tools}).encode(), MessagesBody
    ).prompts()
    assert [function.strict for function in prompt["tools"].functions] == [True]
