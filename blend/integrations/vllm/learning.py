"""What stage rows stores: caches that prompts missed, texts of clients within a budget, and KV corrections of both.

Rows are computed in the engine's thread, a few at a time: in some of its steps while answers run, in all while none do.
Threads of their own read and write the store and fit the corrections.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from blend.chunks.surrogate import LARGEST_SHARE, with_surrogate
from blend.config import CorpusConfig
from blend.errors import ConfigError, StoreError, first_line
from blend.integrations.vllm.contract import LOG, OutageLog
from blend.integrations.vllm.decoder import PagedDecoder, only
from blend.limits import check_number
from blend.model.forward import RowRequest
from blend.prefill.blender import Blender
from blend.serve.background import EncodingQueue, IOPool
from blend.serve.learned import LearnedCaches
from blend.serve.limits import LEARN_BUDGET
from blend.types import CacheKey, Tokens

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.types import PromptLayout

CPU_ROWS, GPU_ROWS = 32, 256
"""Rows of a piece, meant to take about as long as a step that decodes a few answers; measured on a CPU."""
TURN = 4  # while answers run, one step in so many computes a piece, as in `blend serve`
MOST_PREFIXES = 16  # prefixes, with their corpora, whose chunks are remembered for fitting
_WAIT_S = 0.01  # for the store while nothing runs, so that the engine does not spin


def learn_budget(options: Mapping[str, Any]) -> int:
    """Bytes of the store for clients' texts; 0 stores none. Raises `ValueError`, in one line."""
    learn, budget = options.get("learn", True), options.get("learn_budget", LEARN_BUDGET / 1e9)
    if not isinstance(learn, bool):
        raise ValueError(f"kvblend: learn is {learn!r}; give true or false")
    try:
        check_number("learn_budget", budget)
    except ConfigError as error:
        raise ValueError(f"kvblend: {error}") from None
    return round(budget * 1e9) if learn else 0


class LentDecoder(PagedDecoder):
    """The worker's decoder for another thread, which waits in `run_rows` until the engine's thread has run every piece."""

    def __init__(self, decoder: PagedDecoder, most_rows: int, wake: Callable[[], None]) -> None:
        super().__init__(decoder.model, decoder.fingerprint, decoder.kept_as, decoder.rotations)
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
        """In the engine's thread: run one piece that is waited for; whether there was one."""
        try:
            done, request = self._pieces_due.get_nowait()
        except queue.Empty:
            return False
        try:
            self._owner.run_rows(request)
        except Exception as error:  # for the thread that waits
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


class RecentTexts:
    """The texts that questions brought last, as token ids, each once. Thread-safe.

    most: tokens to keep, up to the length of the oldest text.
    """

    def __init__(self, most: int) -> None:
        self.tokens = 0
        self._most, self._lock = most, Lock()
        self._chunks: OrderedDict[Tokens, bool] = OrderedDict()

    def add(self, chunks: Iterable[Tokens], *, brought: bool = False) -> None:
        """Add texts of a question. brought: by the client, not of a corpus."""
        with self._lock:
            for chunk in chunks:
                self.tokens += len(chunk) if chunk not in self._chunks else 0
                self._chunks[chunk] = brought
                self._chunks.move_to_end(chunk)
            while self._chunks and self.tokens - len(next(iter(self._chunks))) >= self._most:
                self.tokens -= len(self._chunks.popitem(last=False)[0])

    def latest(self) -> dict[Tokens, bool]:
        """The texts, latest first, each with whether a client brought it."""
        with self._lock:
            return dict(reversed(self._chunks.items()))


class _SeenChunks(NamedTuple):
    """Chunks seen behind one prefix. due: at how many tokens to fit."""

    recent: RecentTexts
    due: list[int]


Admitted = Callable[["ChunkLibrary", Sequence[Tokens]], Collection[Tokens]]
"""Which of these chunks, that clients brought, may have all their caches stored."""


class CorrectionFitter:
    """Fits surrogate context and KV corrections from chunks that a worker saw, as `blend precompute` does for a corpus.

    A thread decides and fits; the engine's thread runs the rows it needs. wake: called when there is a piece to run.
    """

    def __init__(self, decoder: PagedDecoder, most_rows: int, admitted: Admitted, wake: Callable[[], None]) -> None:
        self._lent = LentDecoder(decoder, most_rows, wake)
        self._admitted = admitted
        self._thread = IOPool("kvblend-fitting", 1, wake)
        self._seen: dict[tuple[str, Tokens], _SeenChunks] = {}
        self._running = 0

    def __len__(self) -> int:
        """How many prefixes are being fitted, or wait for it."""
        return self._running

    def add(self, filler: Blender, prefix: Tokens, corpus: Collection[Tokens], brought: Collection[Tokens]) -> None:
        """A prompt had these chunks, which may be stored: of a corpus, and from a client. Called from one thread.

        Fitting begins when there are enough tokens and no KV correction; if nothing came of it, again at twice as many.
        """
        if not filler.config.correction or filler.correction(prefix) is not None:
            return
        tokens = LARGEST_SHARE * CorpusConfig.surrogate_tokens
        key = filler.corpus, prefix
        seen = self._seen.pop(key, None) or _SeenChunks(RecentTexts(LARGEST_SHARE * tokens), [tokens])
        self._seen[key] = seen
        for oldest in list(self._seen)[:-MOST_PREFIXES]:
            del self._seen[oldest]
        seen.recent.add(corpus)
        seen.recent.add(brought, brought=True)
        if not self._running and seen.due[-1] <= seen.recent.tokens:
            seen.due.append(2 * seen.due[-1])
            self._running += 1
            self._thread.start(partial(self._fit, filler, prefix, seen))

    def run_piece(self) -> bool:
        """In the engine's thread: run a piece for the fit, if it waits for one; whether it did."""
        return self._lent.run_piece()

    def close(self) -> None:
        """Cancel, and end."""
        self._lent.close()
        self._thread.close()

    def _fit(self, filler: Blender, prefix: Tokens, seen: _SeenChunks) -> None:
        try:
            lent = Blender(self._lent, filler.store, filler.config, corpus=filler.corpus)
            library, latest = lent.library(prefix), seen.recent.latest()
            if filler.config.surrogate:
                library = with_surrogate(library, list(latest), CorpusConfig.surrogate_tokens)
            brought = [chunk for chunk, mine in latest.items() if mine]
            allowed = self._admitted(library, brought) if brought else ()
            chunks = [chunk for chunk, mine in latest.items() if not mine or chunk in allowed]
            library.compute(library.missing(chunks))
            if lent.calibrate(prefix, chunks):
                LOG.info("kvblend: KV corrections were fitted on %d chunks", len(chunks))
        except CancelledError:
            pass
        except Exception as error:  # no request waits for it
            LOG.warning("kvblend: no KV correction could be fitted: %s", first_line(error))
        finally:
            self._running -= 1


class BackgroundEncoder:
    """Computes and stores caches that prompts missed. The engine's thread calls it.

    learned: decides which caches of clients' texts are stored; None stores none.
    """

    def __init__(self, decoder: PagedDecoder, learned: LearnedCaches | None) -> None:
        rows = CPU_ROWS if decoder.device.type == "cpu" else GPU_ROWS
        self._decoder, self._learned = decoder, learned
        self._news = threading.Event()
        self._thread = IOPool("kvblend-rows", 1, self._news.set)
        self._encodings = EncodingQueue(self._thread, rows, self._on_stored)
        self._fitter = CorrectionFitter(decoder, rows, self._admitted, self._news.set)
        self._turn, self._outage = 0, OutageLog()

    def __len__(self) -> int:
        """How many caches are left, so far known, and how many prefixes whose KV corrections are being fitted."""
        return len(self._encodings) + len(self._fitter)

    def remember(
        self, filler: Blender, layout: PromptLayout, missing: Sequence[CacheKey], brought: Collection[int]
    ) -> None:
        """A prompt was blended, and the store lacked these caches.

        brought: places of texts that its client sent; they count as used even if nothing is missing.
        """
        self._encodings.remember(lambda: self._allowed(filler, layout, missing, brought))

    def run(self, *, alone: bool) -> None:
        """A step of the engine: run a piece, if it is time for one. alone: no request computes anything in the step."""
        self._turn += 1
        if not alone and self._turn % TURN:
            return
        self._news.clear()
        if self._encodings.ready():
            self._run_piece()
        elif not self._fitter.run_piece() and alone and len(self):
            self._news.wait(_WAIT_S)

    def close(self) -> None:
        """Compute no more, and end."""
        self._encodings.close()
        self._fitter.close()
        self._thread.close()

    def _run_piece(self) -> None:
        try:
            self._decoder.run_rows(self._encodings.next_rows())
        except Exception as error:  # of this cache; the next one may be computed
            self._encodings.fail(error)
        else:
            self._encodings.took(torch.empty((1, 0)))  # a chunk's logits are not used

    def _allowed(
        self, filler: Blender, layout: PromptLayout, missing: Sequence[CacheKey], brought: Collection[int]
    ) -> tuple[ChunkLibrary, Sequence[CacheKey]]:
        """Those of the missing caches that may be stored. In the store's thread."""
        library, stored = filler.library(layout.kept_behind), layout.stored
        corpus = {chunk for place, chunk in enumerate(stored) if chunk and place not in brought}
        chunks = {chunk for place in brought if (chunk := stored[place]) and chunk not in corpus}
        mine = self._admitted(library, sorted(chunks))
        self._fitter.add(filler, library.prefix, corpus, mine)
        return library, [one for one in missing if one.chunk not in chunks or one.chunk in mine]

    def _admitted(self, library: ChunkLibrary, chunks: Sequence[Tokens]) -> set[Tokens]:
        if self._learned is None or not chunks:
            return set()
        try:
            return self._learned.admitted(library, library.variants(chunks))
        except StoreError as error:
            self._warn(error)
            return set()

    def _on_stored(self, one: CacheKey, error: Exception | None) -> None:
        if error is not None:
            self._warn(error)
        else:
            self._outage.works()

    def _warn(self, error: Exception) -> None:
        self._outage.failed("kvblend: a chunk's cache could not be stored: %s", first_line(error))
