"""Anthropic's Messages API, with the real client."""

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from served import Served
from tool_rooms import ASKED, CITY, FAMILIES

from blend.serve.http.messages import MessagesBody

QUESTION = "The weather in Paris?"
WEATHER: Any = {"name": "weather", "description": "The weather.", "input_schema": CITY}
ONE_CALL: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def client_of(served: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120, **options)


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(served) as made:
        yield made


def asked(*said: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return {"messages": messages, "max_tokens": 12, **more}


def chat_text(served: Served, messages: list[Any], **more: Any) -> str:
    with served.openai() as client:
        answer = client.chat.completions.create(model=served.model, messages=messages, max_tokens=12, **more)
    return str(answer.choices[0].message.content)


def test_an_answer_is_that_of_chat_completions(served: Served, claude: anthropic.Anthropic) -> None:
    system: Any = [
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
    ]
    message = claude.messages.create(model=served.model, system=system, **asked(QUESTION))
    assert message.content[0].text == chat_text(
        served, [{"role": "system", "content": "Be brief.\nBe kind."}, ASKED[1]]
    )
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "max_tokens", None)
    assert message.usage.output_tokens == 12
    figures = message.kvblend["figures"]
    usage = message.usage
    assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens == figures["rows"], "the system is marked"
    longer = claude.messages.create(model=served.model, **asked("Hello.", "Yes?", QUESTION))
    said = asked("Hello.", "Yes?", QUESTION)["messages"]
    assert longer.content[0].text == chat_text(served, said)


RAW = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop"),
)


def test_the_events_of_a_stream(served: Served, claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model=served.model, **asked(QUESTION))
    with claude.messages.stream(model=served.model, **asked(QUESTION)) as stream:
        events = [event for event in stream if event.type in RAW]
        final = stream.get_final_message()
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (final.stop_reason, final.id[:4]) == ("max_tokens", "msg_")


def test_a_stop_sequence_is_named(served: Served, claude: anthropic.Anthropic) -> None:
    text = claude.messages.create(model=served.model, **asked(QUESTION)).content[0].text
    stop = text[4:6]
    message = claude.messages.create(model=served.model, **asked(QUESTION, stop_sequences=["never said", stop]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == text[: text.index(stop)]
    with claude.messages.stream(model=served.model, **asked(QUESTION, stop_sequences=[stop])) as stream:
        assert stream.get_final_message().stop_sequence == stop


def test_a_conversation_reads_its_earlier_turns_from_the_cache(served: Served, claude: anthropic.Anthropic) -> None:
    first = asked("Count the gates of the harbour. " * 20)
    marked: Any = [{"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    answer = claude.messages.create(model=served.model, **first)
    messages: Any = [
        *first["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": marked},
    ]
    again = claude.messages.create(model=served.model, messages=messages, max_tokens=4)
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
    message = claude.messages.create(model=served.model, messages=[{"role": "user", "content": blocks}], max_tokens=12)
    text = f"The harbour\n\nNine gates.\n{QUESTION}"
    assert message.content[0].text == chat_text(served, [{"role": "user", "content": text}])
    answer = claude.messages.create(model=f"{served.model}+corpus", **asked("How many gates?"))
    assert len(answer.kvblend["sources"]) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_is_used_and_its_result_sent_back(served_tools: Callable[[str], Served], family: str) -> None:
    served = served_tools(family)
    more: Any = {"model": served.model, "extra_body": {"seed": 1, "temperature": 1.5}, **ONE_CALL}
    with client_of(served) as claude:
        question = {"role": "user", "content": QUESTION}
        message = claude.messages.create(messages=[question], max_tokens=200, **more)
        with claude.messages.stream(messages=[question], max_tokens=200, **more) as stream:
            streamed = stream.get_final_message()
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert (call.name, message.stop_reason) == ("weather", "tool_use")
        assert call.input["city"] in ("Paris", "Rome")
        assert [(block.name, block.input) for block in streamed.content if block.type == "tool_use"] == [
            (call.name, call.input)
        ]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
        said: Any = [question, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        last = claude.messages.create(
            model=served.model, messages=said, tools=[WEATHER], max_tokens=8, extra_body={"seed": 1}
        )
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens > message.usage.input_tokens


def test_the_client_lists_models(served: Served, claude: anthropic.Anthropic) -> None:
    models = list(claude.models.list())
    assert [model.id for model in models] == [served.model, f"{served.model}+corpus"]
    assert {model.type for model in models} == {"model"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("fields", "place"), WRONG, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_is_wrong_is_told_in_its_shape(http: httpx.Client, fields: dict[str, Any], place: str, path: str) -> None:
    if place == "max_tokens" and path.endswith("count_tokens"):
        pytest.skip("counting needs none")
    body = {key: value for key, value in {**asked(QUESTION), **fields}.items() if value is not None}
    response = http.post(path, json=body)
    document = response.json()
    assert (response.status_code, document["type"]) == (400, "error"), document
    assert document["error"]["type"] == "invalid_request_error"
    assert place in document["error"]["message"]


def test_a_key_in_anthropics_header(listen: Callable[..., Served]) -> None:
    from blend.serve.http.requests import ApiKeys

    served = listen(ApiKeys([("secret", "")]))
    with anthropic.Anthropic(base_url=served.url, api_key="secret", max_retries=0) as claude:
        assert claude.messages.create(model=served.model, **asked(QUESTION)).content
    wrong = anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0)
    with wrong as claude, pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        claude.messages.create(model=served.model, **asked(QUESTION))


def test_what_agents_send_besides_is_taken(http: httpx.Client) -> None:
    """Beta headers and query, fields of context management, thoughts and marks that come back."""
    thoughts = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [thoughts, {"type": "text", "text": "Yes?", "citations": None}]},
        {"role": "user", "content": QUESTION},
        {"role": "system", "content": "Remember to be brief."},
    ]
    more = {
        "metadata": {"user_id": "ada"},
        "thinking": {"type": "disabled"},
        "context_management": {"edits": []},
        "output_config": {"effort": "medium"},
        "service_tier": "auto",
        "temperature": 1,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    response = http.post("/v1/messages?beta=true", json={**asked(), "messages": messages, **more}, headers=headers)
    assert response.status_code == 200, response.text


SESSIONS = ("ab0e8d3c-6f5f-4b0c-9d63-0c1f5ae0c001", "ab0e8d3c-6f5f-4b0c-9d63-0c1f5ae0c002")
NAMES = {
    "json": '{{"device_id":"{user}","account_uuid":"","session_id":"{session}"}}',
    "words": "user_{user}_account__session_{session}",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_the_sessions_of_an_agent_have_one_end_user(name: str) -> None:
    def end_user(user: str, session: str) -> str | None:
        metadata = {"user_id": name.format(user=user, session=session)}
        return MessagesBody.model_validate(asked(QUESTION, metadata=metadata)).end_user

    first, second, other = (end_user("ada", SESSIONS[0]), end_user("ada", SESSIONS[1]), end_user("bob", SESSIONS[0]))
    assert first == second
    assert first != other


def test_a_stream_that_has_begun_ends_with_its_error(serve: Callable[..., Served]) -> None:
    served = serve(http={"grace_s": 0.0})

    def watch(claude: anthropic.Anthropic) -> None:
        for event in claude.messages.create(model=served.model, stream=True, **asked(QUESTION, max_tokens=3000)):
            if event.type == "content_block_delta":
                served.stop()

    with client_of(served) as claude, pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        watch(claude)
