"""From a request to a prompt, in three steps: refuse what cannot be answered, build the prompt, complete it.

`build_prompt` refuses, then collects passages, then lays out the chat template, then finds all text that can be reused.
`completed` adds how it is answered, what is learned of it, and which of its text is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import ContextLengthError, PromptError, StoreError
from blend.serve.failures import STORE_UNREACHABLE
from blend.serve.forms.thoughts import ThoughtMarkers, thinking_behind
from blend.serve.prompt import ASKED_FOR, Cited, Prompt
from blend.serve.prompts.reuse import PromptSearch, Reuse, Texts, with_texts
from blend.serve.prompts.view import Require, require_fit
from blend.serve.request import FieldError, Mark, Message, Request
from blend.text import json_text

if TYPE_CHECKING:
    from blend.layout import Place, PromptLayout
    from blend.serve.prompts.tenant import TenantState

MOST_OF_A_TOKEN = 64  # characters: more than any text has per token on average
_COUNTED = 4096  # characters tokenized at a time to count them
_CUT_TOKENS = 32  # tokens that a cut inside a text may add to its count
_SEEDS = 2**31


class Rules(NamedTuple):
    """What holds for all prompts of a server.

    Attributes:
        full: never blend.
        unnamed: the end user of requests that name none, if they all come from one; "" if they may come from several.
        thoughts: of the model; None if it has none.

    """

    full: bool = False
    unnamed: str = ""
    thoughts: ThoughtMarkers | None = None


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
    texts = partial(tenant.texts, view, request.user, anywhere=anywhere)
    reused = with_texts(_searched(tenant, request, layout, passages, texts), tenant.decoder.tokenizer)
    reaches = [tenant.chat.reach(mark, request, places, layout) for mark in request.marks]
    history = partial(_rows_before_last_message, tenant, request, places, layout)
    return reused._replace(reaches=tuple(reaches), history=history)


def _searched(
    tenant: TenantState, request: Request, layout: PromptLayout, passages: Sequence[Cited], texts: Callable[[], Texts]
) -> Reuse:
    """The prompt with all known text as its places, and its flight.

    It is searched again if another request of the end user has begun meanwhile: requests that come together would not find each
    other's text.
    """
    flights = tenant.flights
    if flights is None or request.cold or request.method == "full":
        return PromptSearch(layout, passages, texts()).reuse()
    for last in (False, False, True):
        begun = flights.begun(request.user)
        reuse = PromptSearch(layout, passages, texts()).reuse()
        brought = {place.whole for place in reuse.layout.places if place.is_brought}
        if not brought:
            return reuse
        flight = flights.begin(request.user, brought, None if last else begun)
        if flight is not None:
            break
    return reuse._replace(flight=flight)


def _rows_before_last_message(
    tenant: TenantState, request: Request, places: Sequence[Place], layout: PromptLayout
) -> int:
    """How many of a prompt's rows stand in front of its last message, and of the passages in it; 0 in a new conversation."""
    if not any(message.role == "assistant" for message in request.messages):
        return 0
    before = len(request.messages) - 2
    mark = Mark(0.0, before, len(request.messages[before].content))
    return tenant.chat.reach(mark, request, places, layout)


def completed(reuse: Reuse, tenant: TenantState, request: Request, rules: Rules) -> Prompt:
    """The prompt, yet without the grammar of its answer. Its marked text is pinned."""
    decoder = tenant.decoder
    reachable = tenant.watch.reachable()
    brings_text = any(passage.brought for passage in reuse.cited)
    remember = not rules.full and reachable and not (brings_text and tenant.learned is None)
    learns = remember and (brings_text or reuse.question is not None)
    learn = partial(tenant.learn, origin=request.origin)
    sampling = request.sampling
    thoughts = rules.thoughts if request.prompt is None else None
    full_because = "" if reachable else STORE_UNREACHABLE
    if rules.full or request.method == "full":
        full_because = ASKED_FOR
    config = None
    if request.quality is not None:
        config = replace(tenant.rag().blend_config, quality=request.quality)
    prompt = Prompt(
        request,
        reuse.layout,
        sampling=replace(
            sampling,
            max_tokens=decoder.answer_length(reuse.layout.rows, sampling.max_tokens),
            # A seed that is drawn here lets an audit draw the same answer again.
            seed=random.randrange(_SEEDS) if sampling.seed is None else sampling.seed,
        ),
        full_because=full_because,
        corpus=reuse.corpus,
        cited=reuse.cited,
        question=reuse.question,
        learn=learn if learns else None,
        flight=reuse.flight if learns and not full_because else None,
        author=request.users_session or request.user or ("" if request.forwarded else rules.unnamed),
        history=reuse.history,
        computed=reuse.computed,
        remember=remember,
        config=config,
        thinking=thinking_behind(decoder.tokenizer, thoughts, reuse.layout.token_ids),
    )
    return _with_pins(prompt, tenant, reuse.reaches) if reachable and not rules.full else prompt


def _with_pins(prompt: Prompt, tenant: TenantState, reaches: Sequence[int]) -> Prompt:
    """The prompt, whose marked text is pinned, with what is known of caches that may be missing."""
    request = prompt.request
    try:
        absent = tenant.absent(prompt)
        texts = prompt.brought_texts(tenant.decoder.operator_rows) if prompt.learn is not None else {}
        if texts and tenant.learned is not None and not request.session:
            tenant.learned.share(texts, request.user)
        marks = list(zip(request.marks, reaches, strict=True))
        seconds = {
            text: max((mark.seconds for mark, reach in marks if start < reach), default=0.0)
            for text, start in texts.items()
        }
        marked = {text: lasts for text, lasts in seconds.items() if lasts}
        kept = tenant.keep(prompt, marked) if marked else None
    except StoreError:  # its own outage shows when the prompt's turn comes
        return prompt
    return replace(prompt, kept=kept, absent=absent)


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
