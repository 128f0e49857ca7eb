"""Makes the engine's prompts out of requests: passages first, then the chat template, then all text that can be reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blend.errors import ContextLengthError, PromptError
from blend.limits import json_text
from blend.serve.prompt import Cited
from blend.serve.prompts.chat_template import question_turns, template_arguments
from blend.serve.prompts.reuse import Reuse, reuse, with_texts
from blend.serve.prompts.view import Require, require_fit
from blend.serve.request import FieldError, Mark, Message, Request
from blend.types import common_length

if TYPE_CHECKING:
    from blend.serve.prompts.tenant import TenantState
    from blend.types import PromptLayout

MOST_OF_A_TOKEN = 64  # characters: more than any text has per token on average
_COUNTED = 4096  # characters tokenized at a time to count them
_CUT_TOKENS = 32  # tokens that a cut inside a text may add to its count


def build_prompt(tenant: TenantState, request: Request, require: Require = lambda: None) -> Reuse:
    """The token ids of a request's prompt, and its passages.

    Raises `PromptError` and `ConfigError` for requests that cannot be answered, `RetrievalError` if there is nothing to
    retrieve from, `StoreError` if a corpus or document that it names cannot be read now.
    """
    decoder = tenant.decoder
    chat = tenant.chat
    longest = decoder.context_length
    if longest is not None:
        _require_length(request, longest, tenant.template.count, require)
    if request.prompt is None:
        _require_question(request, takes_tools=chat.takes_tools)
    elif not isinstance(request.prompt, str):
        _require_tokens(request.prompt, decoder.vocabulary)
    view = tenant.view(request.corpus)
    passages = list[Cited]()
    if request.prompt is not None:
        layout = chat.continued(request.prompt)
    else:
        passages = view.passages(request, longest, require)
        require()
        layout = _chat_layout(tenant, request, request.messages, passages)
    anywhere = not request.corpus and all(passage.brought for passage in passages)
    texts = tenant.texts(view, request.user, anywhere=anywhere)
    reused = with_texts(reuse(layout, passages, texts), decoder.tokenizer)
    reaches = [_reach(tenant, request, mark, passages, layout.token_ids) for mark in request.marks]
    return reused._replace(reaches=tuple(reaches))


def _reach(
    tenant: TenantState,
    request: Request,
    mark: Mark,
    passages: Sequence[Cited],
    ids: Sequence[int],
) -> int:
    """How many of a prompt's tokens a mark keeps: those that it has in common with the prompt of other text behind the mark."""
    if mark.message is None:
        return len(ids)
    messages = list(request.messages)
    behind = messages[mark.message].content[mark.characters :]
    if mark.message == len(messages) - 1 and not behind:
        return len(ids)
    other = "," if behind.startswith(".") else "."
    content = messages[mark.message].content[: mark.characters]
    messages[mark.message] = messages[mark.message]._replace(content=content + other * bool(behind))
    for number in range(mark.message + 1, len(messages)):
        other = "," if messages[number].content.startswith(".") else "."
        messages[number] = messages[number]._replace(content=other)
    try:
        layout = _chat_layout(tenant, request, messages, passages)
    except PromptError:  # a template that asks more of a message's text
        return len(ids)
    return common_length(ids, layout.token_ids)


def _chat_layout(
    tenant: TenantState,
    request: Request,
    messages: Sequence[Message],
    passages: Sequence[Cited],
) -> PromptLayout:
    turns = question_turns(messages, [passage.place for passage in passages], tenant.instructions)
    return tenant.chat.layout(turns, template_arguments(request.template, request.tools))


def _require_question(request: Request, *, takes_tools: bool) -> None:
    """Refuse conversations that ask nothing, and tools that the model would never see."""
    last = request.messages[-1] if request.messages else Message("user", "")
    if last.role == "assistant" or (last.role != "tool" and not last.content.strip()):
        raise PromptError("the last message must say something, and not be the assistant's")
    with_calls = any(message.role == "tool" or message.tool_calls for message in request.messages)
    if (request.tools is not None or with_calls) and not takes_tools:
        field = "messages" if request.tools is None else "tools"
        raise FieldError(
            f"{field}: the model's chat template has no place for tools; ask without, or serve another", field
        )


def _require_tokens(ids: Sequence[int], vocabulary: int) -> None:
    """Refuse ids that the model lacks; they may be those of control tokens."""
    if max(ids) >= vocabulary:
        raise FieldError(f"prompt: there is no token {max(ids):,}; give ids from 0 to {vocabulary - 1:,}", "prompt")


def _require_length(
    request: Request,
    longest: int,
    count: Callable[[str], int],
    require: Require,
) -> None:
    """Refuse what cannot fit before it is cut into chunks, which takes far longer than counting its tokens."""
    texts = _texts_of(request)
    characters = sum(map(len, texts)) + sum(len(document.title) for document in request.documents)
    if characters <= longest:
        return
    if characters > longest * MOST_OF_A_TOKEN:
        raise ContextLengthError(
            f"the prompt has {characters:,} characters, more than the {longest:,} tokens that the model reads can hold; "
            "shorten it",
            longest,
        )
    tokens = 0
    for text in texts:
        for start in range(0, len(text), _COUNTED):
            require()
            words = " ".join(text[start : start + _COUNTED].split())  # blanks of a document may not reach the prompt
            tokens += max(0, count(words) - _CUT_TOKENS)
            require_fit(tokens, longest)


def _texts_of(request: Request) -> list[str]:
    """All texts of a request that its prompt holds."""
    texts = [request.prompt] if isinstance(request.prompt, str) else []
    for message in request.messages:
        texts += [message.content, message.thoughts, *(call.arguments for call in message.tool_calls)]
    texts += [document.text for document in request.documents]
    if request.tools is not None:
        texts += [json_text(function.described) for function in request.tools.functions]
    return texts
