"""Refuses requests that cannot be answered, before anything is cut or searched for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blend.errors import ContextLengthError, PromptError
from blend.limits import json_text
from blend.serve.prompts.view import Require, require_fit
from blend.serve.request import FieldError, Message, Request

if TYPE_CHECKING:
    from blend.serve.prompts.tenant import TenantState

MOST_OF_A_TOKEN = 64  # characters: more than any text has per token on average
_COUNTED = 4096  # characters tokenized at a time to count them
_CUT_TOKENS = 32  # tokens that a cut inside a text may add to its count


def require_answerable(tenant: TenantState, request: Request, require: Require) -> None:
    """Refuse what cannot fit, conversations that ask nothing and tokens that the model lacks. Raises `PromptError`."""
    decoder = tenant.decoder
    if decoder.context_length is not None:
        _require_length(request, decoder.context_length, tenant.template.count, require)
    if request.prompt is None:
        _require_question(request, takes_tools=tenant.chat.takes_tools)
    elif not isinstance(request.prompt, str):
        _require_tokens(request.prompt, decoder.vocabulary)


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


def _require_length(request: Request, longest: int, count: Callable[[str], int], require: Require) -> None:
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
