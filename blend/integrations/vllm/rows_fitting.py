"""Surrogate context and KV corrections of caches that a worker keeps under its own name, as `blend precompute` makes them.

A thread beside the engine's decides and fits, by the same code. The rows that it needs are run by the engine's thread, a
piece at a time, when no answer has to wait for them.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from blend.chunks.deciding import with_surrogate
from blend.chunks.open_library import Tokens
from blend.config import CorpusConfig
from blend.errors import first_line
from blend.filling import Filler
from blend.integrations.vllm.rows_decoder import PagedDecoder, only
from blend.model.rows import RowRequest
from blend.serve.background import IOPool
from blend.serve.learned import SHARE, RecentTexts

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary

MOST_PLACES = 16  # prefixes, with their corpora, of which chunks are remembered
_LOG = logging.getLogger("vllm.kvblend")

Admitted = Callable[["ChunkLibrary", Sequence[Tokens]], Collection[Tokens]]
"""Which of these chunks, that clients brought, may have all their caches stored."""


class LentDecoder(PagedDecoder):
    """A worker's decoder for another thread, which waits in `run_rows` until the engine's thread has run every piece."""

    def __init__(self, decoder: PagedDecoder, most_rows: int, wake: Callable[[], None]) -> None:
        super().__init__(decoder.model, decoder.facts, decoder.rotations)
        self._owner, self._most_rows, self._wake = decoder, most_rows, wake
        self._pieces_due: queue.SimpleQueue[tuple[Future[None], RowRequest]] = queue.SimpleQueue()
        self._closed = False

    def run_rows(self, request: RowRequest) -> None:
        """As its base does. Raises `CancelledError` when the engine ends."""
        for piece in torch.split(request.positions, max(1, self._most_rows // request.token_ids.shape[0])):
            done = Future[None]()
            self._pieces_due.put((done, only(request, piece)))
            if self._closed:
                self.close()
            self._wake()
            done.result()

    def run_piece(self) -> bool:
        """Run one that is waited for; whether there was one. The engine's thread calls it."""
        try:
            done, request = self._pieces_due.get_nowait()
        except queue.Empty:
            return False
        try:
            self._owner.run_rows(request)
        except Exception as error:  # of who waits for it
            done.set_exception(error)
        else:
            done.set_result(None)
        return True

    def close(self) -> None:
        """Run nothing more."""
        self._closed = True
        while True:
            try:
                self._pieces_due.get_nowait()[0].cancel()
            except queue.Empty:
                return


class _Place(NamedTuple):
    """Chunks seen behind one prefix. brought: those that came with requests. due: at how many tokens to fit."""

    recent: RecentTexts
    brought: set[Tokens]
    due: list[int]


class Fitting:
    """For one worker. admitted: which of clients' texts may be stored. wake: called when there is a piece to run."""

    def __init__(self, decoder: PagedDecoder, most_rows: int, admitted: Admitted, wake: Callable[[], None]) -> None:
        self._lent = LentDecoder(decoder, most_rows, wake)
        self._admitted = admitted
        self._beside = IOPool("kvblend-fitting", 1, wake)
        self._places: dict[tuple[str, Tokens], _Place] = {}
        self._running = 0

    def __len__(self) -> int:
        """How many prefixes are being fitted, or wait for it."""
        return self._running

    def hear(self, filler: Filler, prefix: Tokens, corpus: Collection[Tokens], brought: Collection[Tokens]) -> None:
        """A prompt had these chunks, which may be stored: of a corpus, and from a client. Called from one thread.

        When there are enough of them, and no KV correction, fitting begins; where nothing came of it, again at twice as many.
        """
        if not filler.config.correction or filler.correction(prefix) is not None:
            return
        tokens = SHARE * CorpusConfig.surrogate_tokens
        key = filler.corpus, prefix
        place = self._places.pop(key, None) or _Place(RecentTexts(SHARE * tokens), set(), [tokens])
        self._places[key] = place
        for oldest in list(self._places)[:-MOST_PLACES]:
            del self._places[oldest]
        place.recent.add((*corpus, *brought))
        place.brought.update(brought)
        if not self._running and place.due[-1] <= place.recent.tokens:
            place.due.append(2 * place.due[-1])
            self._running += 1
            self._beside.start(partial(self._fit, filler, prefix, place))

    def run_piece(self) -> bool:
        """Run a piece for it, if it waits for one; whether it did."""
        return self._lent.run_piece()

    def close(self) -> None:
        """Give it up, and end."""
        self._lent.close()
        self._beside.close()

    def _fit(self, filler: Filler, prefix: Tokens, place: _Place) -> None:
        try:
            lent = Filler(self._lent, filler.store, filler.config, corpus=filler.corpus)
            library, chunks = lent.library(prefix), place.recent.latest(place.due[-1])
            if filler.config.surrogate:
                library = with_surrogate(library, chunks, CorpusConfig.surrogate_tokens)
            brought = [chunk for chunk in chunks if chunk in place.brought]
            allowed = self._admitted(library, brought) if brought else ()
            chunks = [chunk for chunk in chunks if chunk not in place.brought or chunk in allowed]
            library.compute(library.missing(chunks))
            if lent.calibrate(prefix, chunks):
                _LOG.info("kvblend: KV corrections were fitted on %d chunks", len(chunks))
        except CancelledError:
            pass
        except Exception as error:  # no request waits for it
            _LOG.warning("kvblend: no KV correction could be fitted: %s", first_line(error))
        finally:
            self._running -= 1
