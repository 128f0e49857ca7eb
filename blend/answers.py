"""An answer of `Rag`, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass, field

from blend.model.generate import Generation
from blend.prefill.blender import Blend
from blend_retrieval import RankedChunks

NONE_RETRIEVED = "no passage is similar enough to the question (--min-score): answered without documents"


@dataclass(frozen=True)
class FullAnswer:
    """The same prompt answered after the model's own full prefill."""

    text: str
    ttft_s: float


@dataclass(frozen=True)
class Answer:
    """An answer and how it came about.

    Attributes:
        question: The question as it was asked.
        text: The answer.
        chunks: The retrieved chunks in prompt order, best first; `blend.hits` says which were cached.
        blend: The blended prefill: rows recomputed, bytes loaded, hits.
        generation: The generated token ids with their times.
        full: The answer after full prefill, if `compare` was set.
        cut: Whether the answer reached its token limit.
        problems: One line for every damaged store entry, and for caches that could not be stored.

    """

    question: str
    text: str
    chunks: RankedChunks
    blend: Blend
    generation: Generation
    full: FullAnswer | None = None
    cut: bool = False
    problems: tuple[str, ...] = field(default=())

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, retrieval included."""
        return dict(self.blend.stages)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, without retrieval."""
        return self.blend.ttft_s - self.stages.get("retrieve", 0.0)
