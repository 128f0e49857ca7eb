"""What prompts lacked in the store, computed when running answers do not wait for it, and stored beside the engine's thread.

A piece of a few rows goes with some of the engine's steps while answers run, and with every one while none do: whoever comes
then waits for one piece at most.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.open_library import Tokens, Variant
from blend.errors import StoreError, first_line
from blend.integrations.vllm.rows_fitting import Fitting
from blend.serve.background import EncodingQueue, EncodingTask, IOPool

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.filling import Filler
    from blend.integrations.vllm.rows_decoder import PagedDecoder
    from blend.integrations.vllm.rows_learned import LearnedTexts
    from blend.types import PromptLayout

CPU_ROWS, GPU_ROWS = 32, 256
"""Of a piece: meant to take about as long as a step that decodes a few answers does; measured on a CPU alone."""
TURN = 4  # while answers run, one step in so many waits for a piece, as in `blend serve`
_WAIT_S = 0.01  # for the store, while nothing runs, so that the engine does not go round in vain

_LOG = logging.getLogger("vllm.kvblend")


class Lacking(NamedTuple):
    """What a prompt lacked. filler: what filled it. missing: caches. brought: places of texts that its client brought."""

    filler: Filler
    layout: PromptLayout
    missing: Sequence[Variant]
    brought: Collection[int]


class Later:
    """For one worker. The engine's thread alone calls it.

    learned: who says what of clients' texts may be stored; without it nothing of them is.
    """

    def __init__(self, decoder: PagedDecoder, learned: LearnedTexts | None) -> None:
        self._decoder, self._learned = decoder, learned
        self._news, self._admitting = threading.Event(), threading.Lock()
        self._beside, rows = IOPool("kvblend-rows", 1, self._news.set), rows_of_piece(decoder.device)
        self._encodings = EncodingQueue(self._beside, rows, self._told)
        self._fitting = Fitting(decoder, rows, self._whole, self._news.set)
        self._turn, self._warned = 0, False

    def __len__(self) -> int:
        """How many caches are left, as far as that is known, and how many prefixes whose KV corrections are being fitted."""
        return len(self._encodings) + len(self._fitting)

    def remember(self, lacked: Lacking) -> None:
        """A prompt was blended; texts that came with it count as used, whether anything was lacking or not."""
        self._encodings.remember(lambda: self._allowed(lacked))

    def run(self, *, alone: bool) -> None:
        """A step of the engine: a piece of the next cache, or of what is fitted, if it is time for one.

        alone: no request computes anything in it.
        """
        self._turn += 1
        if not alone and self._turn % TURN:
            return
        self._news.clear()
        encoding = self._encodings.first()
        if encoding is not None and encoding.ready():
            self._piece(encoding)
        elif not self._fitting.run_piece() and alone and len(self):
            self._news.wait(_WAIT_S)

    def close(self) -> None:
        """Compute no more of them, and end."""
        self._encodings.close()
        self._fitting.close()
        self._beside.close()

    def _piece(self, encoding: EncodingTask) -> None:
        try:
            self._decoder.run_rows(encoding.next_rows())
        except Exception as error:  # of this cache; the next one may be computed
            encoding.fail(error)
        else:
            encoding.took(torch.empty((1, 0)))  # nobody reads logits of a chunk

    def _allowed(self, lacked: Lacking) -> tuple[ChunkLibrary, Sequence[Variant]]:
        """Those of the lacking caches that may be stored. IOPool the engine's thread."""
        library, stored = lacked.filler.library(lacked.layout.kept_behind), lacked.layout.stored
        corpus = {chunk for place, chunk in enumerate(stored) if place not in lacked.brought}
        chunks = {chunk for place in lacked.brought if (chunk := stored[place]) and chunk not in corpus}
        mine = self._admitted(library, sorted(chunks))
        brought = {one.chunk for one in mine}
        self._fitting.hear(lacked.filler, library.prefix, {one for one in corpus if one}, brought)
        return library, [one for one in lacked.missing if one.chunk not in chunks or one in mine]

    def _admitted(self, library: ChunkLibrary, chunks: Sequence[Tokens]) -> set[Variant]:
        if self._learned is None or not chunks:
            return set()
        try:
            with self._admitting:
                return self._learned.admitted(library, chunks, lambda: self._encodings.keys(library.store))
        except StoreError as error:
            self._warn(error)
            return set()

    def _whole(self, library: ChunkLibrary, chunks: Sequence[Tokens]) -> set[Tokens]:
        """Those of these chunks, which clients brought, of which every cache may be stored."""
        mine = self._admitted(library, chunks)
        return {chunk for chunk in chunks if mine.issuperset(library.variants([chunk]))}

    def _told(self, one: Variant, error: Exception | None) -> None:
        if error is not None:
            self._warn(error)
        else:
            self._warned = False

    def _warn(self, error: Exception) -> None:
        if not self._warned:  # one line an outage
            _LOG.warning("kvblend: a chunk's cache could not be stored: %s", first_line(error))
        self._warned = True


def rows_of_piece(device: torch.device) -> int:
    """As many as take no longer than running answers may wait."""
    return CPU_ROWS if device.type == "cpu" else GPU_ROWS
