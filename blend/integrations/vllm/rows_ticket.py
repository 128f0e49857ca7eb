"""A prompt's layout as a ticket: the lengths of its segments, which with the token ids say all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from blend.types import Part, PromptLayout


def ticket_of(layout: PromptLayout) -> str:
    """Of a prompt that a stage is to blend."""
    told: dict[str, Any] = {"prefix": len(layout.prefix), "chunks": [len(chunk) for chunk in layout.chunks]}
    if layout.plain:
        told["plain"] = sorted(layout.plain)
    if layout.parts:
        told["parts"] = [[place, part.whole, part.first] for place, part in sorted(layout.parts.items())]
    if layout.home is not None:
        told["home"] = layout.home
    return json.dumps(told, separators=(",", ":"))


def layout_of(ticket: str, token_ids: Sequence[int]) -> PromptLayout:
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
        home = tuple(told["home"]) if "home" in told else None
    except (ValueError, KeyError, TypeError):
        raise ValueError("the ticket describes no prompt of these tokens") from None
    return PromptLayout(ids[: cuts[0]], chunks, ids[cuts[-1] :], frozenset(told.get("plain", ())), parts, home)
