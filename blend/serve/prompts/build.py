"""Makes the engine's prompts out of requests: passages first, then the chat template, then all text that can be reused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from blend.serve.prompts.checks import require_answerable
from blend.serve.prompts.reuse import Reuse, reuse, with_texts
from blend.serve.prompts.view import Require
from blend.serve.request import Mark, Request

if TYPE_CHECKING:
    from blend.serve.prompts.tenant import TenantState
    from blend.types import Place, PromptLayout


def build_prompt(tenant: TenantState, request: Request, require: Require = lambda: None) -> Reuse:
    """The token ids of a request's prompt, and its passages.

    Raises `PromptError` and `ConfigError` for requests that cannot be answered, `RetrievalError` if there is nothing to
    retrieve from, `StoreError` if a corpus or document that it names cannot be read now.
    """
    require_answerable(tenant, request, require)
    view = tenant.view(request.corpus)
    passages = view.passages(request, tenant.decoder.context_length, require) if request.prompt is None else []
    require()
    places = [passage.place for passage in passages]
    layout = tenant.chat.prompt(request, places)
    anywhere = not request.corpus and all(passage.brought for passage in passages)
    texts = tenant.texts(view, request.user, anywhere=anywhere)
    reused = with_texts(reuse(layout, passages, texts), tenant.decoder.tokenizer)
    reaches = [tenant.chat.reach(mark, request, places, layout) for mark in request.marks]
    history = partial(_rows_before_last_message, tenant, request, places, layout)
    return reused._replace(reaches=tuple(reaches), history=history)


def _rows_before_last_message(
    tenant: TenantState, request: Request, places: Sequence[Place], layout: PromptLayout
) -> int:
    """How many of a prompt's rows stand in front of its last message, and of the passages in it; 0 in a new conversation."""
    if not any(message.role == "assistant" for message in request.messages):
        return 0
    before = len(request.messages) - 2
    mark = Mark(0.0, before, len(request.messages[before].content))
    return tenant.chat.reach(mark, request, places, layout)
