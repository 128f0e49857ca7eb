"""Anthropic's Messages API, with the real client."""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import anthropic
import httpx
import pytest
from served import Served
from tool_rooms import ASKED, CITY, FAMILIES, chat_text

from blend.serve.http.keys import ApiKeys
from blend.serve.http.messages import MessagesBody

QUESTION = "The weather in Paris?"
WEATHER: Any = {"name": "weather", "description": "The weather.", "input_schema": CITY}
ONE_CALL: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def client_of(served: Served, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(served) as made:
        yield made


def asked(*said: Any, **more: Any) -> dict[str, Any]:
    """Contents of messages of user and assistant in turn."""
    messages = [{"role": role, "content": one} for role, one in zip(cycle(("user", "assistant")), said, strict=False)]
    return {"messages": messages, "max_tokens": 12, **more}


def test_an_answer_is_that_of_chat_completions(served: Served, claude: anthropic.Anthropic) -> None:
    system: Any = [
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
    ]
    message = claude.messages.create(model=served.model, system=system, **asked(QUESTION))
    expected = chat_text(served, [{"role": "system", "content": "Be brief.\nBe kind."}, ASKED[1]])
    assert message.content[0].text == expected
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "max_tokens", None)
    usage, rows = message.usage, message.kvblend["figures"]["rows"]
    assert usage.output_tokens == 12
    assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens == rows, "the system is marked"
    longer = asked("Hello.", "Yes?", QUESTION)
    answer = claude.messages.create(model=served.model, **longer)
    assert answer.content[0].text == chat_text(served, longer["messages"])


def test_the_events_of_a_stream(served: Served, claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model=served.model, **asked(QUESTION))
    events = list(claude.messages.create(model=served.model, stream=True, **asked(QUESTION)))
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == whole.content[0].text
    assert events[0].message.id.startswith("msg_")
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("max_tokens", whole.usage.output_tokens)


def test_a_stop_sequence_is_named(served: Served, claude: anthropic.Anthropic) -> None:
    text = claude.messages.create(model=served.model, **asked(QUESTION)).content[0].text
    stop = text[4:6]
    message = claude.messages.create(model=served.model, **asked(QUESTION, stop_sequences=["never said", stop]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == text[: text.index(stop)]
    with claude.messages.stream(model=served.model, **asked(QUESTION, stop_sequences=[stop])) as stream:
        assert stream.get_final_message().stop_sequence == stop


def test_a_conversation_reads_its_earlier_turns_from_the_cache(served: Served, claude: anthropic.Anthropic) -> None:
    said = "Count the gates of the harbour. " * 20
    answer = claude.messages.create(model=served.model, **asked(said))
    marked: Any = [{"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    again = claude.messages.create(model=served.model, **asked(said, answer.content, marked))
    usage = again.usage
    assert usage.cache_read_input_tokens >= answer.usage.input_tokens
    assert usage.input_tokens == 0
    assert usage.cache_read_input_tokens + usage.cache_creation_input_tokens == again.kvblend["figures"]["rows"]


def test_tokens_are_counted_as_they_are_used(served: Served, claude: anthropic.Anthropic) -> None:
    body = asked("How many gates?", "Four.", QUESTION, system="Be brief.")
    counted = claude.messages.count_tokens(model=served.model, messages=body["messages"], system="Be brief.")
    used = claude.messages.create(model=served.model, **body).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_documents_and_the_corpus(served: Served, claude: anthropic.Anthropic) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Nine gates."}
    blocks: Any = [{"type": "document", "source": source, "title": "The harbour"}, {"type": "text", "text": QUESTION}]
    message = claude.messages.create(model=served.model, **asked(blocks))
    text = f"The harbour\n\nNine gates.\n{QUESTION}"
    assert message.content[0].text == chat_text(served, [{"role": "user", "content": text}])
    models = list(claude.models.list())
    assert claude.models.retrieve(models[1].id) == models[1]
    assert [(model.type, model.id) for model in models] == [
        ("model", served.model),
        ("model", f"{served.model}+corpus"),
    ]
    answer = claude.messages.create(model=models[1].id, **asked("How many gates?"))
    assert len(answer.kvblend["sources"]) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_is_used_and_its_result_sent_back(served_tools: Callable[[str], Served], family: str) -> None:
    served = served_tools(family)
    more: Any = {"model": served.model, "extra_body": {"seed": 1, "temperature": 1.5}, **ONE_CALL}
    with client_of(served) as claude:
        question = asked(QUESTION, max_tokens=200, **more)
        message = claude.messages.create(**question)
        with claude.messages.stream(**question) as stream:
            streamed = stream.get_final_message()
        (call,), (same,) = ([block for block in one.content if block.type == "tool_use"] for one in (message, streamed))
        assert (call.name, message.stop_reason) == ("weather", "tool_use")
        assert call.input["city"] in ("Paris", "Rome")
        assert (same.name, same.input) == (call.name, call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
        said = asked(QUESTION, message.content, [result], tools=[WEATHER])
        last = claude.messages.create(model=served.model, **said)
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens > message.usage.input_tokens


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("fields", "place"), WRONG, ids=lambda value: str(value)[:50])
def test_what_is_wrong_is_told_in_its_shape(http: httpx.Client, fields: dict[str, Any], place: str) -> None:
    path = f"/v1/messages{'' if 'max_tokens' in fields else '/count_tokens'}"
    response = http.post(path, json={**asked(QUESTION), **fields})
    document = response.json()
    assert (response.status_code, document["type"]) == (400, "error"), document
    assert document["error"]["type"] == "invalid_request_error"
    assert place in document["error"]["message"]


def test_a_key_in_anthropics_header(listen: Callable[..., Served]) -> None:
    served = listen(ApiKeys([("secret", "")]))
    with client_of(served, "secret") as claude:
        assert claude.messages.create(model=served.model, **asked(QUESTION)).content
    with client_of(served, "wrong") as claude, pytest.raises(anthropic.AuthenticationError, match="authentication_err"):
        claude.messages.create(model=served.model, **asked(QUESTION))


def test_what_agents_send_besides_is_taken(http: httpx.Client) -> None:
    """Beta headers and query, fields of context management, thoughts and marks that come back."""
    thoughts = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    said = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    body = asked(said, [thoughts, {"type": "text", "text": "Yes?", "citations": None}], QUESTION)
    body["messages"].append({"role": "system", "content": "Remember to be brief."})
    more = {
        "metadata": {"user_id": "ada"},
        "thinking": {"type": "disabled"},
        "context_management": {"edits": []},
        "output_config": {"effort": "medium"},
        "service_tier": "auto",
        "temperature": 1,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    response = http.post("/v1/messages?beta=true", json={**body, **more}, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "name",
    ['{{"device_id":"{}","account_uuid":"","session_id":"{}"}}', "user_{}_account__session_{}"],
    ids=["json", "words"],
)
def test_the_sessions_of_an_agent_have_one_end_user(name: str) -> None:
    def end_user(user: str, session: int) -> str | None:
        metadata = {"user_id": name.format(user, f"ab0e8d3c-6f5f-4b0c-9d63-0c1f5ae0c00{session}")}
        return MessagesBody.model_validate(asked(QUESTION, metadata=metadata)).end_user

    assert end_user("ada", 1) == end_user("ada", 2) != end_user("bob", 1)


def test_an_agent_that_names_only_its_session_is_an_end_user_of_its_own() -> None:
    def end_user(session: int) -> str | None:
        user_id = f'{{"device_id":"","account_uuid":"","session_id":"ab0e8d3c-6f5f-4b0c-9d63-0c1f5ae0c00{session}"}}'
        return MessagesBody.model_validate(asked(QUESTION, metadata={"user_id": user_id})).end_user

    assert end_user(1) != end_user(2)
    assert MessagesBody.model_validate(asked(QUESTION)).end_user == ""


def test_a_stream_that_has_begun_ends_with_its_error(serve: Callable[..., Served]) -> None:
    served = serve(http={"grace_s": 0.0})
    with client_of(served) as claude:
        stream = claude.messages.create(model=served.model, stream=True, **asked(QUESTION, max_tokens=3000))
        next(event for event in stream if event.type == "content_block_delta")
        served.stop()
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            list(stream)
