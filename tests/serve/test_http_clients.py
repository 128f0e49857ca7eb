"""The clients that people have, against a server that listens: one question, the same answer through all of them."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from rooms import QUESTION
from served import Served

from blend.prompt import render_chunk

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
RETRIEVE = {"kvblend": {"retrieve": {"top_k": 4}}}
TOKENS = 12


@pytest.fixture(scope="module")
def expected(served: Served) -> str:
    """What the corpus answers, asked without any client library."""
    response = httpx.post(
        f"{served.base_url}/chat/completions", json={"messages": MESSAGES, "max_tokens": TOKENS, **RETRIEVE}, timeout=60
    )
    answer = response.json()
    assert [source["kind"] for source in answer["kvblend"]["sources"]] == ["retrieved"] * 4
    return str(answer["choices"][0]["message"]["content"])


def test_openai(served: Served, client: openai.OpenAI, expected: str) -> None:
    names = [model.id for model in client.models.list()]
    assert names == [served.model, f"{served.model}+corpus"]
    assert client.models.retrieve(names[1]).id == names[1]
    whole = client.chat.completions.create(
        model=served.model, messages=MESSAGES, max_tokens=TOKENS, extra_body=RETRIEVE
    )
    by_name = client.chat.completions.create(model=names[1], messages=MESSAGES, max_completion_tokens=TOKENS)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.chat.completions.create(model=names[1], messages=MESSAGES, max_tokens=TOKENS, **options))
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.model, messages=MESSAGES, n=17)
    assert whole.choices[0].message.content == by_name.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == TOKENS
    assert 0 < whole.usage.prompt_tokens_details.cached_tokens < whole.usage.prompt_tokens
    assert len(whole.kvblend["sources"]) == 4
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
    assert parts[-1].usage.completion_tokens == TOKENS
    assert len(parts[0].kvblend["sources"]) == 4
    assert (missing.value.code, refused.value.param) == ("model_not_found", "n")


def test_openai_learns_what_the_model_reads(served: Served, client: openai.OpenAI) -> None:
    models, again = list(client.models.list()), client.models.retrieve(f"{served.model}+corpus")
    long: list[Any] = [{"role": "user", "content": "word " * 15_000}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.model, messages=long, user="me", metadata={})
    assert again in models
    service = served.state.service
    for model in models:
        assert (model.object, model.owned_by, model.root) == ("model", "kvblend", served.model)
        assert model.max_model_len == service.tenant("").rag().decoder.context_length
        assert model.created > 1_700_000_000
    assert refused.value.code == "context_length_exceeded"


def test_what_clients_dump_may_be_sent_back(served: Served, client: openai.OpenAI) -> None:
    said = client.responses.create(model=served.model, input=QUESTION, max_output_tokens=TOKENS)
    items: list[Any] = [*MESSAGES, *(item.model_dump() for item in said.output), *MESSAGES]
    assert client.responses.create(model=served.model, input=items, max_output_tokens=4).output_text
    parts = [{"type": "text", "text": QUESTION, "cache_control": None}]
    own: list[Any] = [{"role": "user", "content": parts, "provider_specific_fields": None}]
    assert client.chat.completions.create(model=served.model, messages=own, max_tokens=4).choices
    own[0]["provider_specific_fields"] = {"thought": 1}
    with pytest.raises(openai.BadRequestError, match="provider_specific_fields"):
        client.chat.completions.create(model=served.model, messages=own, max_tokens=4)


@pytest.mark.parametrize(
    "spelled",
    [
        lambda text, title: f"{title}\n{text}",
        lambda text, title: {"data": f"{title}\n{text}"},
        lambda text, title: {"data": {"title": title, "text": text}},
        lambda text, title: {"data": {"title": title, "snippet": text}, "id": "one"},
        lambda text, title: {"title": title, "text": text, "id": "one"},
    ],
)
def test_documents_as_texts_and_as_cohere_has_them(
    served: Served, client: openai.OpenAI, expected: str, spelled: Callable[[str, str], Any]
) -> None:
    chunks = [hit.chunk for hit in served.state.service.tenant("").rag().retriever.search(QUESTION, 4)]
    documents = [spelled(chunk.text, chunk.title) for chunk in chunks]
    answer = client.chat.completions.create(
        model=served.model, messages=MESSAGES, max_tokens=TOKENS, extra_body={"documents": documents}
    )
    assert answer.choices[0].message.content == expected
    assert [source["document"] == "one" for source in answer.kvblend["sources"]] == [
        isinstance(one, dict) and "id" in one for one in documents
    ]


def test_langchain(served: Served, expected: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": served.base_url, "api_key": "none", "max_retries": 0, "max_tokens": TOKENS}
    model = ChatOpenAI(model=f"{served.model}+corpus", **options)
    answer = model.invoke([HumanMessage(QUESTION)])
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == TOKENS
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    assert "".join(str(part.content) for part in model.stream([HumanMessage(QUESTION)])) == expected
    rag = served.state.service.tenant("").rag()
    chunks = [hit.chunk for hit in rag.retriever.search(QUESTION, 4)]
    for body in (RETRIEVE, {"documents": [{"title": chunk.title, "text": chunk.text} for chunk in chunks]}):
        assert ChatOpenAI(model=served.model, extra_body=body, **options).invoke(QUESTION).content == expected
    chain = ChatPromptTemplate([("user", "{context}")]) | ChatOpenAI(model=served.model, **options)
    pasted = f"{rag.prompt_config.chat_instructions}\n\n" + "".join(map(render_chunk, chunks)) + QUESTION
    assert chain.invoke({"context": pasted}).content == expected


def test_llamaindex(served: Served, expected: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=f"{served.model}+corpus",
        api_base=served.base_url,
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=TOKENS,
        max_retries=0,
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(messages).message.content == expected
    assert "".join(part.delta or "" for part in model.stream_chat(messages)) == expected
