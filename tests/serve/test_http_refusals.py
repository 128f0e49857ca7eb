"""Whatever a client sends that cannot be answered is refused by name in OpenAI's shape, and never with a 500."""

import json
import logging
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import CHAT, USER, Served, logged

from blend.errors import StoreError
from blend.serve.failures import LOG
from blend.serve.http import bodies


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    assert not re.search("instance of|Body|pydantic", error["message"])
    return error


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    nothing = {
        **dict.fromkeys(("tools", "stop", "stream_options", "seed")),
        **dict.fromkeys(("n", "best_of", "repetition_penalty"), 1),
        "tool_choice": "none",
        "logit_bias": {},
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
        "store": False,
        "verbosity": "medium",
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {
            "role": "assistant",
            "content": "Yes?",
            "refusal": None,
            "tool_calls": None,
            "function_call": {},
            "audio": None,
        },
        *USER,
    ]
    assert served.ask(**nothing, messages=messages).status_code == 200


def test_the_last_message_may_be_the_systems(served: Served) -> None:
    asked = [{"role": "developer", "content": "Say something about the harbour."}]
    assert served.ask(messages=asked).status_code == 200
    for fields in ({"documents": ["The harbour has seven gates."]}, {"kvblend": {"retrieve": {"top_k": 2}}}):
        refused = error_of(served.ask(messages=asked, **fields))
        assert "user's" in refused["message"], "documents stand before what the user says"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_cannot_change_an_answer_is_accepted(http: httpx.Client, path: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    listed = re.findall(r"`(\w+)`", page.split("cannot change an answer:", 1)[1].split(".", 1)[0])
    assert set(listed) == set(bodies.IGNORED)
    ignored = {**dict.fromkeys(listed, "x"), "user": "somebody", "safety_identifier": "5f1"}
    asked = {"max_tokens": 2, **({"messages": USER} if "chat" in path else {"prompt": "The harbour"})}
    plain, more = (http.post(path, json={**asked, **fields}) for fields in ({}, ignored))
    assert (plain.status_code, more.status_code) == (200, 200), more.text
    assert more.json()["choices"] == plain.json()["choices"]


def test_the_docs_name_no_code_that_there_is_not() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs" / "http.md").read_text().split("## Errors", 1)[1]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")]
    codes = re.findall(r"`([a-z]+(?:_[a-z]+)*)`", " ".join(rows))
    source = "".join(path.read_text() for path in (root / "blend" / "serve").rglob("*.py"))
    assert len(codes) > 15
    assert [code for code in codes if f'"{code}"' not in source] == []


def test_a_prompt_that_is_too_long_is_refused_by_its_field(http: httpx.Client) -> None:
    long = "When did the harbour open? " * 3000
    messages = [{"role": "user", "content": long}]
    for path, param, prompt in (
        (CHAT, "messages", messages),
        ("/v1/completions", "prompt", long),
        ("/v1/responses", "input", long),
    ):
        error = error_of(http.post(path, json={param: prompt}))
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CALL = {**CALL, "function": {"name": "f", "arguments": "[]"}}
SCHEMA = "response_format.json_schema.schema"


NEGATED = {"name": "x", "schema": {"type": "object", "not": {}}}
SAID = {"role": "assistant", "content": "x"}
ALONE: list[tuple[str, Any]] = [
    *(("min_p", 1.1), ("top_k", -2), ("presence_penalty", 2.1), ("frequency_penalty", "1"), ("repetition_penalty", 0)),
    *(("logit_bias", {str(token): 1 for token in range(1025)}), ("n", True), ("n", 17), ("max_tokens", 10**30)),
    *(("seed", 2**64), ("stop", ["a"] * 33), ("top_logprobs", 3), ("stream_options", {"include_usage": True})),
    *(("messages", []), ("messages", USER * 1001), ("documents", [{"text": "x"}] * 65)),
]
LACKING: list[tuple[str, Any]] = [
    *(("functions", [{"name": "f"}]), ("function_call", "auto"), ("audio", {"voice": "alloy"}), ("store", True)),
    *(("modalities", ["text", "audio"]), ("moderation", {"model": "x"})),
]
WRONG = [
    *(({name: value}, name, INVALID) for name, value in ALONE),
    *(({name: value}, name, UNSUPPORTED) for name, value in LACKING),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", INVALID),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", INVALID),
    ({"logit_bias": {"999999999": 1}}, None, INVALID),
    ({"kvblend": {"retrive": {}}}, "kvblend.retrive", "unknown_parameter", "Extra inputs are not permitted"),
    ({"n": 2, "best_of": 3}, "best_of", UNSUPPORTED),
    ({"n": 2, "kvblend": {"verify": True}}, "kvblend.verify", INVALID),
    ({"stop": ""}, "stop", INVALID, "an empty text would end every answer at once"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", INVALID, "Input should be 'system', 'de"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", INVALID),
    ({"messages": [{**USER[0], "function_call": {"name": "f"}}]}, "messages[0].function_call", UNSUPPORTED),
    ({"messages": [{**USER[0], "tool_calls": [CALL]}]}, "messages[0].tool_calls", INVALID),
    ({"messages": [*USER, {**SAID, "tool_calls": [BAD_CALL]}]}, "messages[1].tool_calls[0].function.arguments", None),
    ({"messages": [*USER, {**SAID, "tool_calls": [CALL]}, *USER]}, "messages", INVALID),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": " "}]}, None, INVALID),
    ({"messages": [*USER, {"role": "assistant", "content": "b"}]}, None, INVALID),
    ({"tools": [TOOL]}, "tools", INVALID, "the model's chat template has no place for tools"),
    ({"tools": [TOOL, TOOL]}, "tools", INVALID, "two are called 'f'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", INVALID),
    ({"tool_choice": "some"}, "tool_choice.type", INVALID, "Input should be 'none', 'auto', 'required' or 'function'"),
    ({"tool_choice": "required"}, "tool_choice", INVALID, "a call is required"),
    ({"tool_choice": {**TOOL, "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice", INVALID, "there is no tool"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": NEGATED}},
        SCHEMA,
        INVALID,
        'Unimplemented keys: ["not"]',
    ),
    ({"documents": [{}]}, "documents[0]", INVALID),
    ({"documents": [{"id": "x", "title": "y"}]}, "documents[0].title", INVALID),
    ({"documents": [{"data": {"url": "x", "text": "x"}}]}, "documents[0].url", "unknown_parameter"),
    ({"documents": [{"data": {"text": "x"}, "text": "x"}]}, "documents[0]", INVALID),
    ({"documents": [{"text": "x"}, {"title": "t", "text": " \n"}]}, "documents[1].text", INVALID),
    ({"kvblend": {"corpus": "none"}}, "kvblend.corpus", "corpus_not_found"),
    ({"kvblend": {"corpus": "", "retrieve": {"corpus": "none"}}}, "kvblend.retrieve.corpus", INVALID),
    ({"kvblend": {"deadline_s": 10**6}}, "kvblend.deadline_s", INVALID, "Input should be less than or equal to 86400"),
    ({"kvblend": {"retrieve": True}}, "kvblend.retrieve", INVALID, "Input should be an object"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:60])
def test_what_is_wrong_is_told_by_its_place(served: Served, wrong: tuple[Any, ...]) -> None:
    """Fields, the place of the mistake, its code if only one is right, and what is allowed there."""
    fields, param, code, *allowed = wrong
    error = error_of(served.ask(**fields))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert code in (None, error["code"])
    assert not allowed or error["message"].startswith(f"{param}: {allowed[0]}")


def test_completions_take_no_documents(http: httpx.Client, served: Served) -> None:
    asked = {"prompt": "How many gates?", "max_tokens": 2, "model": served.model}
    refused: dict[str, dict[str, Any]] = {
        "documents": {"documents": [{"text": "The harbour has nine gates."}]},
        "kvblend.retrieve": {"kvblend": {"retrieve": {}}},
        "model": {"model": f"{served.model}+corpus"},
    }
    for param, fields in refused.items():
        error = error_of(http.post("/v1/completions", json={**asked, **fields}))
        assert (error["param"], error["code"]) == (param, "invalid_value")


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe{}", b'{"model\xff": 1}'),
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
        b'{"n":' + b"9" * 9999 + b',"messages":[{"role":"user","content":"x"}]}',
        b'{"messages":' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b'{"' + b"f" * 90_000 + b'":1,"messages":[{"role":"user","content":"x"}]}',
    ],
    ids=lambda raw: str(raw[:30]),
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_bodies_that_are_none(http: httpx.Client, path: str, raw: bytes) -> None:
    error_of(http.post(path, content=raw, headers={"content-type": "application/json"}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    *("model", "messages", "max_tokens", "stop", "kvblend", "documents", "stream"),
    *("n", "logprobs", "logit_bias", "x"),
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
def test_any_json_is_answered_or_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    raw = json.dumps({"messages": USER, "max_tokens": 1, **fields})
    response = http.post(CHAT, content=raw.encode("utf-8", "surrogatepass"))
    if response.status_code != 200:
        error_of(response, 404 if response.status_code == 404 else 400)


def test_the_model_must_be_one_that_there_is(served: Served) -> None:
    mine = served.model
    for name in ("gpt-5", f"{mine}+corpus:x", f"{mine}+corpus:", mine.upper(), mine[:-1], f"{mine}+"):
        error = error_of(served.ask(model=name), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"].endswith(f"there are: {mine}, {mine}+corpus")


def test_paths_and_methods_that_are_none(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/images/generations"), 404)["code"] == "not_found"
    refused = http.get(CHAT)
    assert "POST" in error_of(refused, 405)["message"]
    assert refused.headers["allow"] == "POST"


def test_bodies_beyond_the_limit(http: httpx.Client) -> None:
    large = b" " * 160_000
    parts = (large[start : start + 1000] for start in range(0, len(large), 1000))
    for content in (large, parts):
        assert error_of(http.post(CHAT, content=content), 413)["code"] == "body_too_large"


def test_an_outage_of_the_store_is_told_without_its_place(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    down = Mock(side_effect=StoreError("the store /secret/place is down"))
    # Full prefill takes the same steps, so it does not help either.
    monkeypatch.setattr(served.rag.blender, "steps", down)
    with caplog.at_level(logging.INFO, logger=LOG.name):
        for stream in (False, True):
            response = served.ask(kvblend={"retrieve": {}}, stream=stream)
            assert error_of(response, 503)["code"] == "unavailable"
            assert "secret" not in response.text
            assert response.headers["retry-after"] == "1"
    told = [logged(record) for record in caplog.records if record.levelname == "ERROR"]
    assert [one["why"] for one in told] == ["the store /secret/place is down"] * 2
