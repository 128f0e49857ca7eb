"""Finds out in idle time whether the text that a prompt brought depends on words that change from prompt to prompt.

Its rows are computed once more, behind the words as they were in the prompt before. So they need not be computed when these
words change again (see `edits`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from blend.model.cache import Run
from blend.model.passes import RowRequest, RowSteps
from blend.serve.engine.edits import INDEPENDENT, UNKNOWN, EditEvidence, Hunk, value_changes, with_changes
from blend.serve.failures import log_error

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.serve.engine.histories import Histories
    from blend.serve.engine.prefixes import Conversation, PrefixCache

_MOST = 8  # comparisons that wait; one that is left out makes its rows be computed later
_LEAST_ROWS = 32  # to compare


class RowComparison(NamedTuple):
    """Rows to compare.

    Attributes:
        author: whose prompt it is.
        conversation: the prompt with its answer.
        before: the prompt that it edits.
        hunks: the words that changed, each as long as it was and in its place.
        evidence: of the conversation.
        start: the first row to compare; all behind it are unknown.

    """

    author: str
    conversation: Conversation
    before: Conversation
    hunks: Sequence[Hunk]
    evidence: EditEvidence
    start: int

    @classmethod
    def of(
        cls,
        author: str,
        conversation: Conversation,
        before: Conversation,
        hunks: Sequence[Hunk],
        evidence: EditEvidence,
    ) -> RowComparison | None:
        """The comparison of the text at the end; None if there is none to make, or the words changed their places."""
        compared = np.flatnonzero(evidence.rows != UNKNOWN)
        start = int(compared[-1]) + 1 if len(compared) else 0
        in_place = bool(hunks) and all(hunk.old == hunk.new for hunk in hunks)
        moves = np.count_nonzero(evidence.rows == INDEPENDENT) > len(evidence.rows) / 2
        if not (in_place and moves) or len(evidence.rows) - start < _LEAST_ROWS:
            return None
        return cls(author, conversation, before, hunks, evidence, start)


class ComparisonQueue:
    """Comparisons to make while nothing else is to be done. Only the engine's thread calls it; it is a `BatchItem`.

    Args:
        decoder: computes the rows.
        prefixes: has the rows of earlier prompts.
        histories: gets what was found.
        most_rows: most rows of a piece.

    """

    def __init__(self, decoder: Decoder, prefixes: PrefixCache, histories: Histories, most_rows: int) -> None:
        self._decoder = decoder
        self._prefixes = prefixes
        self._histories = histories
        self._most_rows = most_rows
        self._waiting = deque[RowComparison](maxlen=_MOST)
        self._steps: RowSteps[None] | None = None
        self._piece: RowRequest | None = None

    def __len__(self) -> int:
        """How many are left."""
        return len(self._waiting) + (self._steps is not None)

    def add(self, comparison: RowComparison) -> None:
        """Make it later."""
        self._waiting.append(comparison)

    def clear(self) -> None:
        """Make none of those that are left: a prompt has come."""
        self._waiting.clear()
        self._end()

    def ready(self) -> bool:
        """Prepare the next rows; False if none are left."""
        while self._piece is None and self._waiting:
            self._steps = self._compare(self._waiting.popleft())
            try:
                self._piece = next(self._steps)
            except StopIteration:
                self._end()
            except Exception as error:
                self.fail(error)
        return self._piece is not None

    def next_rows(self) -> RowRequest:
        """The rows of the next pass."""
        assert self._piece is not None
        return self._piece

    def took(self, logits: torch.Tensor) -> None:
        """The rows were run."""
        assert self._steps is not None
        try:
            self._piece = self._steps.send(logits)
        except StopIteration:
            self._end()

    def fail(self, error: Exception) -> None:
        """Give the comparison up; its rows are computed when they are needed."""
        log_error(error, "comparison")
        self._end()

    def _end(self) -> None:
        if self._steps is not None:
            with suppress(ValueError):  # it runs: it ends by itself
                self._steps.close()
        self._steps = self._piece = None

    def _compare(self, comparison: RowComparison) -> RowSteps[None]:
        conversation = comparison.conversation
        ids = conversation.ids
        rows = self._prefixes.rows_of(conversation, 0, len(ids))
        words = [
            (hunk, self._prefixes.rows_of(comparison.before, hunk.old.start, hunk.old.stop))
            for hunk in comparison.hunks
        ]
        if rows is None or any(before is None for _, before in words):
            return
        cache = self._decoder.new_cache(len(ids))
        beginning = rows.rows(0, comparison.start)
        cache.begin(beginning.keys, beginning.values, comparison.start)
        for hunk, before in words:
            assert before is not None
            for layer in range(len(cache.layers)):
                keys, values = cache.view(layer)
                if keys.shape[1]:
                    keys[0, :, hunk.new] = before.keys[layer]
                    values[0, :, hunk.new] = before.values[layer]
        device = self._decoder.device
        tokens = torch.tensor(ids, device=device)[None]
        for piece in Run.consecutive(comparison.start, len(ids), device).pieces(self._most_rows):
            yield RowRequest(tokens[:, piece.positions], piece, cache)
        compared = np.arange(comparison.start, len(ids))
        changes = value_changes(cache, rows, compared, compared, self._decoder.rotations)
        evidence = with_changes(comparison.evidence, compared, changes)
        self._histories.found(comparison.author, conversation, evidence)
