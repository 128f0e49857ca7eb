"""What a worker stores: caches that prompts missed, texts of clients within a budget, and KV corrections of both.

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
from blend.model.passes import RowRequest
from blend.prefill.blender import Blender
from blend.serve.engine.background import EncodingQueue, IOPool
from blend.serve.limits import LEARN_BUDGET
from blend.serve.prompts.learned import LearnedCaches
from blend.types import CacheKey, PlaceOrigin, Tokens

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
    learn = options.get("learn", True)
    budget = options.get("learn_budget", LEARN_BUDGET / 1e9)
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
        self._owner = decoder
        self._most_rows = most_rows
        self._wake = wake
        self._pieces_due: queue.SimpleQueue[tuple[Future[None], RowRequest]] = queue.SimpleQueue()
        self._closed = False

    def run_rows(self, request: RowRequest) -> None:
        """As its base does. Raises `CancelledError` when the engine ends."""
        for piece in torch.split(request.positions, max(1, self._most_rows // request.token_ids.shape[0])):
            result = Future[None]()
            self._pieces_due.put((result, only(request, piece)))
            if self._closed:
                self.close()
            self._wake()
            result.result()

    def run_piece(self) -> bool:
        """In the engine's thread: run one piece that is waited for; whether there was one."""
        try:
            result, request = self._pieces_due.get_nowait()
        except queue.Empty:
            return False
        try:
            self._owner.run_rows(request)
        except Exception as error:  # for the thread that waits
            result.set_exception(error)
        else:
            result.set_result(None)
        return True

    def close(self) -> None:
        """Run nothing more."""
        self._closed = True
        while True:
            try:
                self._pieces_due.get_nowait()[0].cancel()
            except queue.Empty:
                return


class RecentChunks:
    """The chunks that questions used last, as token ids, each once. Thread-safe.

    most: tokens to keep, up to the length of the oldest chunk.
    """

    def __init__(self, most: int) -> None:
        self.tokens = 0
        self._most = most
        self._lock = Lock()
        self._chunks: OrderedDict[Tokens, None] = OrderedDict()

    def add(self, chunks: Iterable[Tokens]) -> None:
        """Add the chunks of a question."""
        with self._lock:
            for chunk in chunks:
                if chunk not in self._chunks:
                    self.tokens += len(chunk)
                self._chunks[chunk] = None
                self._chunks.move_to_end(chunk)
            while self._chunks and self.tokens - len(next(iter(self._chunks))) >= self._most:
                self.tokens -= len(self._chunks.popitem(last=False)[0])

    def latest(self) -> list[Tokens]:
        """The chunks, latest first."""
        with self._lock:
            return list(reversed(self._chunks))


class _PrefixChunks(NamedTuple):
    """Chunks seen behind one prefix. due: at how many tokens to fit."""

    recent: RecentChunks
    due: list[int]


class CorrectionFitter:
    """Fits surrogate context and KV corrections from a corpus's chunks that a worker saw, as `blend precompute` does.

    Clients' texts have no part in them, because they serve every prompt. A thread decides and fits; the engine's thread runs
    the rows it needs. wake: called when there is a piece to run.
    """

    def __init__(self, decoder: PagedDecoder, most_rows: int, wake: Callable[[], None]) -> None:
        self._lent = LentDecoder(decoder, most_rows, wake)
        self._thread = IOPool("kvblend-fitting", 1, wake)
        self._by_prefix: dict[tuple[str, Tokens], _PrefixChunks] = {}
        self._running = 0

    def __len__(self) -> int:
        """How many prefixes are being fitted, or wait for it."""
        return self._running

    def add(self, filler: Blender, prefix: Tokens, chunks: Collection[Tokens]) -> None:
        """A prompt had these chunks of a corpus. Called from one thread.

        Fitting begins when there are enough tokens and no KV correction; if nothing came of it, again at twice as many.
        """
        correction = filler.correction(prefix)
        if not filler.config.correction or (correction is not None and not correction.provisional):
            return
        tokens = LARGEST_SHARE * CorpusConfig.surrogate_tokens
        key = filler.corpus, prefix
        entry = self._by_prefix.pop(key, None) or _PrefixChunks(RecentChunks(LARGEST_SHARE * tokens), [tokens])
        self._by_prefix[key] = entry
        for oldest in list(self._by_prefix)[:-MOST_PREFIXES]:
            del self._by_prefix[oldest]
        entry.recent.add(chunks)
        if not self._running and entry.due[-1] <= entry.recent.tokens:
            entry.due.append(2 * entry.due[-1])
            self._running += 1
            self._thread.start(partial(self._fit, filler, prefix, entry.recent))

    def run_piece(self) -> bool:
        """In the engine's thread: run a piece for the fit, if it waits for one; whether it did."""
        return self._lent.run_piece()

    def close(self) -> None:
        """Cancel, and end."""
        self._lent.close()
        self._thread.close()

    def _fit(self, filler: Blender, prefix: Tokens, recent: RecentChunks) -> None:
        try:
            lent = Blender(self._lent, filler.store, filler.config, corpus=filler.corpus)
            library = lent.library(prefix)
            chunks = recent.latest()
            if filler.config.surrogate:
                library = with_surrogate(library, chunks, CorpusConfig.surrogate_tokens)
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
        self._decoder = decoder
        self._learned = learned
        self._news = threading.Event()
        self._thread = IOPool("kvblend-rows", 1, self._news.set)
        self._encodings = EncodingQueue(self._thread, rows, self._on_stored)
        self._fitter = CorrectionFitter(decoder, rows, self._news.set)
        self._turn = 0
        self._outage = OutageLog()

    def __len__(self) -> int:
        """How many caches are left, so far known, and how many prefixes whose KV corrections are being fitted."""
        return len(self._encodings) + len(self._fitter)

    def remember(
        self,
        filler: Blender,
        layout: PromptLayout,
        missing: Sequence[CacheKey],
        user: str = "",
    ) -> None:
        """A prompt was blended, and the store lacked these caches.

        user: whose client's texts in it are learned; they count as used even if nothing is missing.
        """
        self._encodings.remember(lambda: self._allowed(filler, layout, missing, user))

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
        self,
        filler: Blender,
        layout: PromptLayout,
        missing: Sequence[CacheKey],
        user: str,
    ) -> tuple[ChunkLibrary, Sequence[CacheKey]]:
        """The missing caches that may be stored, and those of new texts. In the store's thread."""
        library = filler.library(layout.kept_behind)
        corpus = {place.whole for place in layout.places if place.origin is PlaceOrigin.CORPUS}
        brought = {place.whole for place in layout.places if place.is_brought} - corpus
        learned = self._admitted(library, sorted(brought), user)
        self._fitter.add(filler, library.prefix, corpus)
        allowed = [key for key in missing if key.chunk not in brought or key.chunk in learned]
        return library, list(dict.fromkeys([*allowed, *library.missing(sorted(learned))]))

    def _admitted(self, library: ChunkLibrary, texts: Sequence[Tokens], user: str) -> set[Tokens]:
        if self._learned is None or not texts:
            return set()
        try:
            return self._learned.admitted(library, texts, user)
        except StoreError as error:
            self._warn(error)
            return set()

    def _on_stored(self, key: CacheKey, error: Exception | None) -> None:
        if error is not None:
            self._warn(error)
        else:
            self._outage.works()

    def _warn(self, error: Exception) -> None:
        self._outage.failed("kvblend: a chunk's cache could not be stored: %s", first_line(error))
