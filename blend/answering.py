"""What an answer is, and what is done for one beside blending and decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blend.blender import Blend, Blender
from blend.config import BlendConfig
from blend.errors import StoreError
from blend.limits import check_number
from blend.model.decoder import Decoder, full_prefill
from blend.model.generate import Generation, generate
from blend.prompt import PromptTemplate
from blend.store import open_store
from blend.types import PromptLayout
from blend_retrieval import RankedChunk

NONE_RETRIEVED = "no passage is similar enough to the question (--min-score): answered without documents"


@dataclass(frozen=True)
class FullAnswer:
    """The same prompt answered after the model's own full prefill."""

    text: str
    ttft_s: float


@dataclass(frozen=True)
class Answer:
    """An answer and how it came about.

    chunks: what was retrieved, best first, in prompt order; `blend.hits` says which came out of the store. ttft_s: seconds
    to the first token, retrieval apart. stages: seconds by stage, retrieval included. full: only when asked to compare. cut:
    whether the answer ended because it reached its longest length. problems: one line for each store entry that was damaged,
    and for caches that could not be stored.
    """

    question: str
    text: str
    chunks: tuple[RankedChunk, ...]
    blend: Blend
    generation: Generation
    full: FullAnswer | None = None
    cut: bool = False
    problems: tuple[str, ...] = field(default=())

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage."""
        return dict(self.blend.stages)

    @property
    def ttft_s(self) -> float:
        """Seconds from the query to the first token, retrieval apart."""
        return self.blend.ttft_s - self.stages.get("retrieve", 0.0)


def rehearse(decoder: Decoder, template: PromptTemplate, config: BlendConfig) -> PromptLayout:
    """A short blended prefill with one chunk from a store in memory and one that is computed: every step runs once."""
    text = template.encode("One chunk, stored or not, as long as a paragraph. " * 4)
    suffix = template.layout("Is everything ready?", []).suffix
    layout = PromptLayout(template.prefix[:1], (tuple(text), tuple(text[1:])), suffix)
    blender = Blender(decoder, open_store("memory:"), config)
    library = blender.library(layout.prefix)
    library.compute(library.missing(layout.chunks[:1]))
    blender.prefill(layout)
    return layout


def room_for(decoder: Decoder, layout: PromptLayout, max_new_tokens: int) -> int:
    """Tokens that the answer may have: no more than the model's context leaves.

    Raises `PromptError` where that is nothing, `ConfigError` for a number that is none.
    """
    check_number("max_new_tokens", max_new_tokens)
    decoder.check_length(layout.rows + 1)
    if decoder.context_length is None:
        return max_new_tokens
    return min(max_new_tokens, decoder.context_length - layout.rows)


def remember(blender: Blender, blend: Blend) -> tuple[str, ...]:
    """Store what was missing. A store that cannot be written must not cost the answer."""
    mend = "answered without it; `blend precompute` makes it again"
    lacking = (*blend.notes, *(f"{mend}: {problem}" for problem in blend.artifact_problems))
    try:
        blender.remember(blend)
    except StoreError as error:
        refused = (f"recomputed for this answer: {problem}" for problem in blend.problems)
        return (*lacking, *refused, f"what was computed for this answer could not be stored: {error}")
    return (*lacking, *(f"recomputed and replaced: {problem}" for problem in blend.problems))


def full_answer(decoder: Decoder, blend: Blend, max_new_tokens: int, options: dict[str, Any]) -> FullAnswer:
    """The same prompt after the model's own prefill."""
    full = full_prefill(decoder, blend.layout)
    text = generate(decoder, full, blend.layout.token_ids, max_new_tokens=max_new_tokens, **options).text
    return FullAnswer(text, full.ttft_s)
