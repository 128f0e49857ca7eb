"""The first rows of the last prompt, for a next one that begins alike."""

from __future__ import annotations

from typing import NamedTuple

from blend.layout import PromptLayout, Tokens, common_length
from blend.prefill.blender import Blend
from blend.serve.engine.prefixes import rows_of_prompt
from blend.types import ChunkCache

MOST_ROWS = 256  # a longer beginning is learned as text when it comes again


class Beginning(NamedTuple):
    """A prompt's rows in front of its first known text: exact, and the same in each prompt that begins with their tokens.

    Every prompt has at least one such row. To compute it alone takes a pass over all weights.

    Attributes:
        model: the decoder's fingerprint.
        ids: the tokens.
        cache: their KV.

    """

    model: str
    ids: Tokens
    cache: ChunkCache

    @classmethod
    def of(cls, blend: Blend) -> Beginning:
        """That of a finished prefill."""
        ids = blend.layout.prefix[:MOST_ROWS]
        return cls(blend.decoder.fingerprint, ids, rows_of_prompt(blend.cache, 0, len(ids)))

    def known(self, model: str, layout: PromptLayout) -> ChunkCache | None:
        """Its rows with which a prompt begins; None if the store has as many."""
        rows = common_length(self.ids, layout.prefix)
        if model != self.model or rows <= layout.shared_prefix_rows:
            return None
        return self.cache.rows(0, rows)
