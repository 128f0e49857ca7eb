"""Completes a prompt that is laid out: how it is answered, what is learned of it, and which of its text is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blend.errors import StoreError
from blend.serve.failures import STORE_UNREACHABLE
from blend.serve.forms.thoughts import ThoughtMarkers, thinking_behind
from blend.serve.prompt import ASKED_FOR, Prompt

if TYPE_CHECKING:
    from blend.serve.prompts.reuse import Reuse
    from blend.serve.prompts.tenant import TenantState
    from blend.serve.request import Request

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


def completed(reuse: Reuse, tenant: TenantState, request: Request, rules: Rules) -> Prompt:
    """The prompt, yet without the grammar of its answer. Its marked text is pinned."""
    decoder = tenant.decoder
    reachable = tenant.watch.reachable()
    brings_text = any(passage.brought for passage in reuse.cited)
    remember = not rules.full and reachable and not (brings_text and tenant.learned is None)
    learns = remember and (brings_text or reuse.question is not None)
    learn = partial(tenant.learn, user=request.user, session=request.session)
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
        author=request.users_session or request.user or rules.unnamed,
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
