"""A prompt's layout as a ticket: the lengths of its segments, which with the token ids say all of it, and whose these are."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from blend.errors import ConfigError
from blend.limits import check_corpus_name
from blend.types import Part, PromptLayout


def ticket_of(layout: PromptLayout, corpus: str = "", brought: Collection[int] = ()) -> str:
    """Of a prompt that a stage is to blend. corpus, brought: see `Told`."""
    told: dict[str, Any] = {"prefix": len(layout.prefix), "chunks": [len(chunk) for chunk in layout.chunks]}
    if layout.plain:
        told["plain"] = sorted(layout.plain)
    if layout.parts:
        told["parts"] = [[place, part.whole, part.first] for place, part in sorted(layout.parts.items())]
    if layout.canonical_prefix is not None:
        told["canonical_prefix"] = layout.canonical_prefix
    if corpus:
        told["corpus"] = corpus
    if brought:
        told["brought"] = sorted(brought)
    return json.dumps(told, separators=(",", ":"))


def ready_for(
    layout: PromptLayout, corpus: str = "", generation: str = "", brought: Collection[int] = ()
) -> dict[str, str]:
    """What a request for this prompt carries.

    generation: of the store. brought: see `Told`. salt: of vLLM's prefix cache, so that only the same blend shares its blocks.
    """
    ticket = ticket_of(layout, corpus, brought)
    told = f"rows {ticket} {layout.token_ids} {generation}"
    return {"ticket": ticket, "salt": sha256(told.encode()).hexdigest()}


def is_layout(ticket: str) -> bool:
    """Whether a ticket is one of these, and not the name of what a prefill process holds."""
    return ticket.startswith("{")


class Told(NamedTuple):
    """What a ticket says of a prompt.

    corpus: whose surrogate context and KV corrections are used. brought: places of its chunks whose text came with the request.
    """

    layout: PromptLayout
    corpus: str = ""
    brought: frozenset[int] = frozenset()


def told_by(ticket: str, token_ids: Sequence[int]) -> Told:
    """The prompt of these token ids. Raises ValueError for a ticket that is none of them."""
    ids = tuple(token_ids)
    try:
        told = json.loads(ticket)
        lengths = [told["prefix"], *told["chunks"]]
        if not all(type(length) is int and length >= 0 for length in lengths) or sum(lengths) > len(ids):
            raise ValueError
        cuts = list(accumulate(lengths))
        chunks = tuple(ids[start:stop] for start, stop in pairwise(cuts))
        parts = {place: Part(tuple(whole), first) for place, whole, first in told.get("parts", ())}
        canonical_prefix = tuple(told["canonical_prefix"]) if "canonical_prefix" in told else None
        corpus = told.get("corpus", "")
        check_corpus_name(corpus)
        brought = frozenset(told.get("brought", ()))
        if not brought <= set(range(len(chunks))):
            raise ValueError
    except (ValueError, KeyError, TypeError, ConfigError):
        raise ValueError("the ticket describes no prompt of these tokens") from None
    plain = frozenset(told.get("plain", ()))
    return Told(PromptLayout(ids[: cuts[0]], chunks, ids[cuts[-1] :], plain, parts, canonical_prefix), corpus, brought)
