"""How much KV running prompts may have: a budget of bytes, or what the decoder has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blend.errors import ContextLengthError

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.serve.engine.sequence import Sequence


class KVRoom:
    """Room for the KV of running prompts and their answers.

    Args:
        decoder: whose rows they are.
        budget: most bytes.

    Attributes:
        budget: most bytes; fewer if the decoder has fewer rows.
        counts_chunks: whether chunks whose caches are computed take room from prompts: the decoder's rows are counted.

    """

    def __init__(self, decoder: Decoder, budget: int) -> None:
        self._row_bytes = sum(layer.width for layer in decoder.rotations) * decoder.dtype.itemsize
        self._cells = decoder.cells
        self.counts_chunks = self._cells is not None
        self.budget = budget if self._cells is None else min(budget, self._cells * self._row_bytes)

    def bytes_of(self, rows: int) -> int:
        """Of so many rows."""
        return rows * self._row_bytes

    def require(self, sequence: Sequence) -> None:
        """Raise `ContextLengthError` for a prompt that needs more than all of it."""
        nbytes = self.bytes_of(sequence.capacity)
        if nbytes <= self.budget:
            return
        layout = sequence.prompt.layout
        sampling = sequence.prompt.sampling
        rows = self.budget // self._row_bytes
        if self._cells == rows:
            amounts = f"{sequence.capacity} rows of the context, which has {rows}"
            remedy = "context (--engine-options)"
        else:
            amounts = f"{nbytes >> 20} MiB of KV memory, all there are are {self.budget >> 20}"
            remedy = "budget"
        raise ContextLengthError(
            f"the prompt and its answers need {amounts}: use fewer chunks, shorter or fewer answers or a larger {remedy}",
            rows // sampling.n - sampling.max_tokens,
            layout.rows,
        )
