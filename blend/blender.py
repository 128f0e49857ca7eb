"""Blended prefill: a prompt's KV from stored chunks, in five steps: load, reposition, select, recompute, first token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from blend.chunks.assemble import Assembly, Opener, Placed, place
from blend.chunks.correction import CorrectionCheck, Corrections, KVCorrection, StoredCorrections
from blend.chunks.encode import ChunkEncoder
from blend.chunks.fit import calibrate
from blend.chunks.library import ChunkLibrary, Tokens, Variant
from blend.config import BlendConfig
from blend.errors import EntryDamagedError, PromptError
from blend.model.forward import Resume, RowRequest, Steps
from blend.recompute import MostRows, Recompute, make_plan
from blend.select import make_selector
from blend.select.selectors import All
from blend.store import open_store
from blend.store.base import ChunkStore
from blend.types import ChunkCache, Progress, PromptLayout, Selection, Stopwatch, no_progress

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder, RowDecoder


_Result = TypeVar("_Result")
NewCache = Callable[[int], "BlendedCache"]
"""An empty cache for a prompt, with room for so many rows."""

MOST_PREFIXES = 16  # whose libraries are kept, each with the prefix's own KV: a prompt a user may have one of its own
_UNCORRECTED = "there is no KV correction for these caches yet: {:.0%} of the rows recomputed"
LEAST_RATIO_UNCORRECTED = 0.3  # of rows, where there is no KV correction yet, or it turns out not to fit a prompt


@dataclass(frozen=True)
class Filled:
    """A prompt's cache, put together from stored chunks and recomputed.

    Attributes:
        cache: KV of the whole prompt, ready for decoding.
        logits: for the next token, `[1, vocab]`.
        selection: the rows that were recomputed.
        hits: which chunks came out of the store; False for ordinary text.
        exact_rows: how many of the first rows have the KV that full prefill gives.
        missing: caches that the store should have held.
        problems: one line for every chunk entry that was refused.
        artifact_problems: the same for surrogate contexts and KV corrections, which were then left out.
        correction_fits: False if the KV corrections were left out for this prompt and more rows recomputed.
        notes: one line for everything that was done otherwise than configured.
        bytes_loaded: bytes of stored KV that were read.
        uncorrected: whether stored rows were used as they are, for want of a KV correction.

    """

    cache: BlendedCache
    logits: torch.Tensor
    selection: Selection
    hits: tuple[bool, ...]
    exact_rows: int
    missing: tuple[Variant, ...]
    problems: tuple[str, ...]
    artifact_problems: tuple[str, ...]
    correction_fits: bool
    notes: tuple[str, ...]
    bytes_loaded: int
    uncorrected: bool


@dataclass(frozen=True)
class Blend(Filled):
    """A finished prefill; see `Filled` for what it knows of its cache.

    Attributes:
        decoder: that computed it.
        layout: the prompt.
        first_token: the token with the highest logit.
        stages: seconds per stage (`blend.types.STAGES`).
        ttft_s: seconds from the call to the first token's id on the host.

    """

    decoder: Decoder
    layout: PromptLayout
    first_token: int
    stages: Mapping[str, float]
    ttft_s: float

    @property
    def rows_recomputed(self) -> int:
        """Rows that were computed in every layer."""
        return int(self.selection.rows.shape[0])

    @property
    def rows_share(self) -> float:
        """Computed rows, summed over layers, as a share of full prefill's."""
        return self.selection.share(self.layout.rows)

    def append(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Run further tokens `[1, n]` behind the prompt.

        Returns:
            Logits `[1, n, vocab]`.

        """
        return self.decoder.append(token_ids, self.cache)

    def rewind(self) -> None:
        """Forget everything that was appended to the prompt."""
        self.cache.truncate(self.layout.rows)


class Attempt(NamedTuple):
    """One try at a prompt. opener: how entries are opened. corrected: whether the KV corrections are added."""

    opener: Opener
    config: BlendConfig
    corrected: bool


class Filler:
    """Fills the caches of prompts from one store, for one decoder.

    config: how rows are chosen, unless a call says otherwise. corpus: whose surrogate context and KV corrections are used.
    uncorrected_ratio: least share of rows to recompute while the store has no KV correction for its caches.
    """

    def __init__(
        self,
        decoder: RowDecoder,
        store: ChunkStore,
        config: BlendConfig | None = None,
        *,
        corpus: str = "",
        uncorrected_ratio: float = 0.0,
    ) -> None:
        self.uncorrected_ratio = uncorrected_ratio
        self.decoder = decoder
        self.store = store
        self.corpus = corpus
        self.config = config or BlendConfig()
        self._libraries: dict[Tokens, ChunkLibrary] = {}
        self._unasked: dict[Tokens, ChunkLibrary] = {}
        self._corrections = StoredCorrections(decoder, store)

    @property
    def prefixes_held(self) -> int:
        """How many prefixes' KV is in memory; at most `MOST_PREFIXES`, of prompts that use the store and of others."""
        return max(len(self._libraries), len(self._unasked))

    def library(self, prefix: Tokens) -> ChunkLibrary:
        """The caches of chunks behind this prefix, as the store is now."""
        held = self._libraries.get(prefix)
        if held is None:
            before = self._unasked.get(prefix)
            now = ChunkLibrary(self.decoder, self.store, prefix, corpus=self.corpus, before=before)
            self._unasked.pop(prefix, None)
        else:
            now = held.renewed()
        _keep(self._libraries, prefix, now)
        return now

    def _library_of(self, layout: PromptLayout) -> ChunkLibrary:
        """The library for a prompt. One that uses no stored chunk does not ask the store, and works during an outage."""
        prefix = layout.kept_behind
        if _asks_store(layout):
            return self.library(prefix)
        held = self._libraries.get(prefix) or self._unasked.get(prefix)
        if held is None:
            held = ChunkLibrary(self.decoder, open_store("memory:"), prefix, corpus=self.corpus)
            _keep(self._unasked, prefix, held)
        return held

    def read_ahead(self, layout: PromptLayout) -> None:
        """Announce that this prompt's chunk caches will be read soon; a store with a memory tier fetches them."""
        self.library(layout.kept_behind).read_ahead([chunk for chunk in layout.stored if chunk is not None])

    def encoder(self, prefix: Tokens) -> ChunkEncoder:
        """The encoder of isolated caches behind this prefix."""
        return self.library(prefix).isolated

    def correction(self, prefix: Tokens, *, contextual: bool = False) -> KVCorrection | None:
        """The KV correction for isolated or contextual caches, from memory or the store.

        None if none was measured, if it is damaged, or if nothing is computed in context.
        """
        return self._corrections.held(self.library(prefix), contextual=contextual).map

    def calibrate(
        self,
        prefix: Tokens,
        chunks: Sequence[Tokens],
        *,
        anew: bool = False,
        progress: Progress = no_progress,
    ) -> bool:
        """Measure and store the KV corrections behind `prefix`, on prompts made of some of these chunks.

        Args:
            prefix: the prompts' prefix.
            chunks: of the corpus.
            anew: measure again even if the store has corrections.
            progress: called with the stage "calibrate".

        Returns:
            Whether there is a correction now.

        Raises:
            StoreError: the store cannot be written.

        """
        plain = [tuple(chunk) for chunk in chunks]
        return calibrate(self._corrections, self.library(prefix), plain, anew=anew, progress=progress)

    def fill(
        self,
        layout: PromptLayout,
        *,
        config: BlendConfig,
        room: int,
        watch: Stopwatch,
        most_rows: MostRows | None = None,
        known: ChunkCache | None = None,
        new_cache: NewCache | None = None,
    ) -> Steps[Filled]:
        """Fill a prompt's cache, in up to three attempts; see `Blender.steps`.

        Damage that is found while layers are read costs a second attempt, on verified entries. A KV correction that does not
        fit the prompt costs one without it, on more rows.

        Args:
            layout: the prompt.
            config: how rows are chosen.
            room: tokens to reserve for decoding.
            watch: times the stages.
            most_rows: rows of a pass at most; None runs all of them in one.
            known: KV of the prompt's first rows; the rest of the prefix is computed.
            new_cache: what the rows are written to; by default a cache of the decoder.

        Raises:
            PromptError: the prompt does not fit the model.
            ConfigError: the selector breaks its contract.

        """
        self._check(layout)
        if _asks_store(layout):
            yield Resume.BACKGROUND
        library = self._library_of(layout)
        if known is None and layout.shared_prefix_rows:
            if not library.isolated.has_prefix:
                yield Resume.NEXT_TURN
            known = library.isolated.prefix.rows(0, layout.shared_prefix_rows)
        known = known or self.decoder.no_rows()
        make = partial(new_cache or self.decoder.new_cache, layout.rows + room)
        attempt = partial(self._attempt, layout, known, make, watch, most_rows)
        try:
            first = yield from attempt(Attempt(library.open, config, config.correction))
        except EntryDamagedError:
            first = yield from attempt(Attempt(library.open_sound, config, config.correction))
        filled = first
        if not first.correction_fits:
            first.cache.free()  # a prompt gets memory for one cache
            more = _with_more_rows(config)
            again = yield from attempt(Attempt(library.open_sound, more, corrected=False))
            filled = _instead_of(first, again, more)
        problems = (*(library.problems if config.surrogate else ()), *first.artifact_problems)
        return replace(filled, artifact_problems=problems)

    def _attempt(
        self,
        layout: PromptLayout,
        known: ChunkCache,
        new_cache: Callable[[], BlendedCache],
        watch: Stopwatch,
        most_rows: MostRows | None,
        attempt: Attempt,
    ) -> Steps[Filled]:
        """The steps of a blended prefill: load, reposition, select, recompute. The first token follows in `Blender.steps`."""
        config = attempt.config
        # Load: open the stored entries. From `with loading` on, threads read them layer by layer, ahead of the passes.
        if _asks_store(layout):
            yield Resume.BACKGROUND
        with watch.stage("load"):
            placed = place(layout, attempt.opener, contextual=config.surrogate)
        with closing(placed):
            # Reposition: each layer moves to the prompt's positions, and gets its correction, before a pass uses it.
            with watch.stage("reposition"):
                selector = make_selector(config.selector)
                adding = attempt.corrected and not isinstance(selector, All)
                found = self.corrections(placed) if adding else Corrections((), ())
                uncorrected = self.uncorrected_ratio > 0 and adding and _lacks_correction(placed, found)
                ratio = max(config.ratio, self.uncorrected_ratio) if uncorrected else config.ratio
                plan = make_plan(
                    layout,
                    placed.hits,
                    selector,
                    ratio,
                    self.decoder.device,
                    first_exact=placed.first_exact,
                    first_lossless=placed.opened.first_lossless,
                    known=known.tokens,
                )
                loading = Assembly(self.decoder, layout, known, placed.readers, new_cache(), found.of_chunks, watch)
            check = CorrectionCheck(self.decoder, layout, loading.added)
            with loading, loading.cache.watched(check.see) if loading.added else nullcontext():
                rows = Recompute(self.decoder, plan, loading, watch, most_rows=most_rows, on_rows=check.choose)
                # Select: the selector chooses rows.
                yield from rows.select()
                # Recompute: the decoder runs them over the cache.
                logits = yield from rows.run()
        return Filled(
            cache=loading.cache,
            logits=logits,
            selection=rows.selection,
            hits=placed.hits,
            exact_rows=plan.exact_rows(rows.selection.rows),
            missing=placed.opened.missing,
            problems=placed.opened.problems,
            artifact_problems=found.problems,
            correction_fits=check.score() >= 0,
            notes=(_UNCORRECTED.format(ratio),) if ratio > config.ratio else (),
            bytes_loaded=placed.opened.nbytes,
            uncorrected=uncorrected,
        )

    def _check(self, layout: PromptLayout) -> None:
        if not (layout.prefix and layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self.decoder.check_length(layout.rows)
        self.decoder.check_ids(layout.token_ids)

    def corrections(self, placed: Placed) -> Corrections:
        """The KV correction of each place of a prompt; a first chunk that is exact needs none."""
        found = self._corrections.of_prompt(placed.opened, first=placed.first)
        return found._replace(of_chunks=placed.spread(found.of_chunks))

    def keep(self, layout: PromptLayout, missing: Sequence[Variant]) -> int:
        """Compute and store the caches that a prompt missed; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        self.library(layout.kept_behind).compute(missing)
        return len({one.chunk for one in missing})


def run_steps(steps: Steps[_Result], run: Callable[[RowRequest], torch.Tensor]) -> _Result:
    """Drive steps to their result, one pass after another; see `Steps`."""
    try:
        request = next(steps)
        while True:
            if isinstance(request, Resume):
                request = next(steps)
                continue
            try:
                given = run(request)
            except EntryDamagedError as error:
                request = steps.throw(error)
            else:
                request = steps.send(given)
    except StopIteration as done:
        result: _Result = done.value
        return result
    finally:
        steps.close()


def _asks_store(layout: PromptLayout) -> bool:
    """Whether a prompt has chunks that the store may hold."""
    return any(chunk is not None for chunk in layout.stored)


def _with_more_rows(config: BlendConfig) -> BlendConfig:
    """For an attempt without a KV correction that did not fit."""
    return replace(config, ratio=min(1.0, max(2 * config.ratio, LEAST_RATIO_UNCORRECTED)))


def _lacks_correction(placed: Placed, found: Corrections) -> bool:
    """Whether a stored chunk is neither exact nor corrected, as after `--quick` or right after learning a text."""
    stored = list(zip(placed.hits, found.of_chunks, strict=True))
    return any(hit and one is None for hit, one in stored[int(placed.first_exact) :])


def _instead_of(first: Filled, again: Filled, more: BlendConfig) -> Filled:
    """The second attempt, charged with the rows of both."""
    spent = [a + b for a, b in zip(first.selection.rows_per_layer, again.selection.rows_per_layer, strict=True)]
    note = f"the KV correction does not fit this prompt: left out, and {more.ratio:.0%} of the rows recomputed instead"
    selection = replace(again.selection, rows_per_layer=tuple(spent))
    return replace(again, correction_fits=False, selection=selection, notes=(note,))


def _keep(libraries: dict[Tokens, ChunkLibrary], prefix: Tokens, library: ChunkLibrary) -> None:
    """Keep it and the most recently used ones."""
    libraries.pop(prefix, None)
    libraries[prefix] = library
    for oldest in list(libraries)[:-MOST_PREFIXES]:
        libraries.pop(oldest, None)


class Blender(Filler):
    """Blended prefill for one HuggingFace decoder over one store.

    Args:
        decoder: the model.
        store: holds the chunk caches.
        config: how rows are chosen, unless a call says otherwise.
        corpus: whose surrogate context and KV corrections are used.

    """

    decoder: Decoder

    def __init__(
        self, decoder: Decoder, store: ChunkStore, config: BlendConfig | None = None, *, corpus: str = ""
    ) -> None:
        super().__init__(decoder, store, config, corpus=corpus)

    def prefill(
        self,
        layout: PromptLayout,
        *,
        config: BlendConfig | None = None,
        room: int = 256,
        watch: Stopwatch | None = None,
    ) -> Blend:
        """Prefill a prompt from stored chunks.

        Damaged store entries are recomputed, never raised.

        Args:
            layout: the prompt.
            config: how rows are chosen; by default the blender's.
            room: tokens to reserve for decoding.
            watch: a stopwatch that runs since the query arrived, if that was earlier.

        Returns:
            The prompt's KV, its first token, and what it cost.

        Raises:
            PromptError: the prompt does not fit the model.
            ConfigError: the selector breaks its contract.
            StoreError: the store cannot be read.

        """
        config, watch = config or self.config, watch or Stopwatch(self.decoder.device)

        def run(request: RowRequest) -> torch.Tensor:
            with self.decoder.before_head(partial(watch.switch, "first_token")):
                return self.decoder.prefill([request], mask=config.mask)

        return run_steps(self.steps(layout, config=config, room=room, watch=watch), run)

    def steps(
        self,
        layout: PromptLayout,
        *,
        config: BlendConfig | None = None,
        room: int = 256,
        watch: Stopwatch | None = None,
        most_rows: MostRows | None = None,
        known: ChunkCache | None = None,
    ) -> Steps[Blend]:
        """`prefill` for a scheduler that interleaves prompts; see `Steps` for how to drive it.

        Args:
            layout: the prompt.
            config: how rows are chosen; by default the blender's.
            room: tokens to reserve for decoding.
            watch: a stopwatch that runs since the query arrived.
            most_rows: rows of a pass at most; stored layers are then in place before a pass that other prompts share.
            known: KV of the prefix, or of its first rows; the rest is computed.

        Raises:
            PromptError: the prompt does not fit the model.
            ConfigError: the selector breaks its contract.
            StoreError: the store cannot be read.

        """
        watch, config = watch or Stopwatch(self.decoder.device), config or self.config
        filled = yield from self.fill(layout, config=config, room=room, watch=watch, most_rows=most_rows, known=known)
        with watch.stage("first_token"):
            first_token = int(filled.logits[0].argmax())
        return Blend(
            **vars(filled),
            decoder=self.decoder,
            layout=layout,
            first_token=first_token,
            stages=dict(watch.stages),
            ttft_s=watch.total(),
        )

    def remember(self, blend: Blend) -> int:
        """Compute and store the caches that `blend` missed, so that the next prompt finds them.

        Returns:
            How many chunks they are of.

        Raises:
            StoreError: the store cannot be written.

        """
        return self.keep(blend.layout, blend.missing)
