"""A prompt's layout as a ticket: the lengths of its segments, which with the token ids say all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
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


def ready_for(layout: PromptLayout) -> dict[str, str]:
    """What a request for this prompt carries. salt: of vLLM's prefix cache, so that only the same blend shares its blocks."""
    ticket = ticket_of(layout)
    return {"ticket": ticket, "salt": sha256(f"rows {ticket} {layout.token_ids}".encode()).hexdigest()}


def by_rows(config: Any) -> bool:
    """Whether a vLLM that is configured so (`VllmConfig`) blends prompts with its own model."""
    transfer = getattr(config, "kv_transfer_config", None)
    return transfer is not None and (transfer.kv_connector_extra_config or {}).get("stage") == "rows"


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
