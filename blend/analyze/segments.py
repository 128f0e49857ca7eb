"""A prompt's segments - prefix, chunks, question - and attention summed over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from blend.types import PromptLayout, Span


@dataclass(frozen=True)
class Segments:
    """Prefix, every chunk and the suffix in prompt order; the spans cover all rows without gaps."""

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, layout: PromptLayout) -> Segments:
        """The segments of a prompt."""
        prefix, suffix = Span(0, len(layout.prefix)), Span(layout.context.stop, layout.rows)
        return cls((prefix, *layout.chunk_spans, suffix))

    @property
    def names(self) -> tuple[str, ...]:
        """How the report calls them: prefix, chunk 1, ..., question."""
        return ("prefix", *(f"chunk {n}" for n in range(1, len(self.spans) - 1)), "question")

    @property
    def owner(self) -> np.ndarray:
        """Index of the segment that each row belongs to, int64 `[rows]`."""
        return np.repeat(np.arange(len(self.spans)), [span.length for span in self.spans])

    def pool(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights `[..., keys]` over the first keys of the prompt, summed by segment: `[..., segments]`."""
        owner = torch.from_numpy(self.owner[: weights.shape[-1]]).to(weights.device)
        member = torch.nn.functional.one_hot(owner, len(self.spans)).to(weights.dtype)
        return weights @ member

    def to_other_chunks(self, by_segment: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Of `[..., rows, segments]`, what each row gives to chunks other than its own, `[..., rows]`; 0 outside chunks."""
        owner = self.owner[rows]
        inside = (owner > 0) & (owner < len(self.spans) - 1)
        chunks = by_segment[..., 1:-1].sum(-1)
        own = np.take_along_axis(by_segment, np.broadcast_to(owner[:, None], (*by_segment.shape[:-1], 1)), -1)[..., 0]
        return np.where(inside, np.maximum(chunks - own, 0.0), 0.0)
