"""Blended prefill: a prompt's KV from stored chunks, in five steps: load, reposition, select, recompute, first token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from cachetools import LRUCache

from blend.chunks.assemble import Assembly
from blend.chunks.correction import CorrectionCheck, Corrections, KVCorrection, StoredCorrections
from blend.chunks.encode import ChunkEncoder
from blend.chunks.fit import calibrate
from blend.chunks.library import ChunkLibrary, OpenLibrary, Tokens, Variant
from blend.config import BlendConfig
from blend.errors import EntryDamagedError, PromptError
from blend.model.forward import Resume, RowRequest, Steps
from blend.quality import RATIOS, Calibration, Drift, Estimate, Judge, Quality, Target
from blend.recompute import MostRows, Recompute, make_plan
from blend.select import All, Selector, Step, make_selector, require_whole_chunks
from blend.select.base import needs_of
from blend.store.base import ChunkStore
from blend.types import LEAD_SHARE, ChunkCache, Progress, PromptLayout, Selection, Stopwatch, no_progress

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder, RowDecoder


_Result = TypeVar("_Result")
NewCache = Callable[[int], "BlendedCache"]
"""An empty cache for a prompt, with room for so many rows."""

MOST_PREFIXES = 16  # whose libraries and KV are kept in memory: every user may have another prefix
_MOST_TARGETS = 64  # qualities that are remembered: requests may name any
_UNCALIBRATED = (
    "no quality is promised: the store has no calibration for this corpus and selector; {:.0%} of the rows recomputed "
    "(`blend precompute --questions` makes one)"
)
_UNREACHABLE = (
    "a calibration on {} prompts cannot show this quality, so all rows are recomputed; give it more questions"
)
_LEADS = "the model has recurrent layers: the first {:.0%} of every chunk are always recomputed"
_UNCORRECTED = "there is no KV correction for these caches yet: {:.0%} of the rows recomputed"
LEAST_RATIO_UNCORRECTED = 0.3  # of rows, if there is no KV correction yet or it does not fit a prompt


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
        notes: one line for everything that was done differently than configured.
        bytes_loaded: bytes of stored KV that were read.
        uncorrected: whether stored rows were used as they are, because there is no KV correction.
        quality: the expected KL to full recompute, if a quality was asked for and the store has a calibration.

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
    quality: Estimate | None


@dataclass(frozen=True)
class Blend(Filled):
    """A finished prefill; see `Filled` for the attributes of its cache.

    Attributes:
        decoder: the model that computed it.
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


class Filler:
    """Fills the caches of prompts from one store, for one decoder.

    Args:
        config: how rows are chosen, unless a call says otherwise.
        corpus: the corpus whose surrogate context and KV corrections are used.
        uncorrected_ratio: least share of rows to recompute while the store has no KV correction for its caches.
        audits: the file that keeps audits of the corpus's calibration; None for memory alone.

    """

    def __init__(
        self,
        decoder: RowDecoder,
        store: ChunkStore,
        config: BlendConfig | None = None,
        *,
        corpus: str = "",
        uncorrected_ratio: float = 0.0,
        audits: Path | None = None,
    ) -> None:
        self.uncorrected_ratio = uncorrected_ratio
        self.decoder = decoder
        self.store = store
        self.corpus = corpus
        self.config = config or BlendConfig()
        self.corrections = StoredCorrections(decoder, store)
        self.calibrations: Calibrations = StoredCalibrations(store, audits, corpus)
        self._held: dict[Tokens, tuple[ChunkEncoder, ChunkLibrary | None]] = {}

    @property
    def prefixes_held(self) -> int:
        """How many prefixes' KV is in memory; at most `MOST_PREFIXES`."""
        return len(self._held)

    def encoder(self, prefix: Tokens) -> ChunkEncoder:
        """The encoder of isolated caches behind this prefix. It needs no store, and works during an outage."""
        encoder, library = self._held.get(prefix) or (ChunkEncoder(self.decoder, prefix, corpus=self.corpus), None)
        self._keep(prefix, encoder, library)
        return encoder

    def library(self, prefix: Tokens) -> ChunkLibrary:
        """The caches of chunks behind this prefix, as the store is now."""
        encoder = self.encoder(prefix)
        _, held = self._held.get(prefix, (encoder, None))
        if held:
            library = held.renewed()
        else:
            library = ChunkLibrary(self.decoder, self.store, prefix, corpus=self.corpus, isolated=encoder)
        self._keep(prefix, encoder, library)
        return library

    def _keep(self, prefix: Tokens, encoder: ChunkEncoder, library: ChunkLibrary | None) -> None:
        """Keep them and the most recently used ones."""
        self._held.pop(prefix, None)
        self._held[prefix] = encoder, library
        for oldest in list(self._held)[:-MOST_PREFIXES]:
            self._held.pop(oldest, None)

    def read_ahead(self, layout: PromptLayout) -> None:
        """Announce that this prompt's chunk caches will be read soon; a store with a memory tier fetches them."""
        self.library(layout.kept_behind).read_ahead(layout)

    def correction(self, prefix: Tokens, *, contextual: bool = False) -> KVCorrection | None:
        """The KV correction for isolated or contextual caches, from memory or the store.

        None if none was measured, if it is damaged, or if nothing is computed in context.
        """
        return self.corrections.held(self.library(prefix), contextual=contextual).map

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
        return calibrate(self.corrections, self.library(prefix), plain, anew=anew, progress=progress)

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

        new_cache: what the rows are written to; by default a cache of the decoder.
        """
        self._check(layout)
        if self.decoder.recurrent:
            layout = layout.composable()
        library = None
        if any(chunk is not None for chunk in layout.stored):
            yield Resume.BACKGROUND
            library = self.library(layout.kept_behind)
        encoder = self.encoder(layout.kept_behind)
        if known is None and layout.shared_prefix_rows:
            if not encoder.has_prefix:
                yield Resume.NEXT_TURN
            known = encoder.prefix.rows(0, layout.shared_prefix_rows)
        if known is None or (self.decoder.recurrent and not known.states):
            known = self.decoder.no_rows()
        make = partial(new_cache or self.decoder.new_cache, layout.rows + room)
        attempt = partial(self._attempt, layout, library, known, make, watch, most_rows)
        try:
            filled = yield from attempt(config, corrected=config.correction)
        except EntryDamagedError:
            filled = yield from attempt(config, corrected=config.correction, sound=True)
        problems = (*(library.problems if library and config.surrogate else ()), *filled.artifact_problems)
        if not filled.correction_fits:
            filled.cache.free()  # a prompt gets memory for one cache
            more = replace(config, ratio=min(1.0, max(2 * config.ratio, LEAST_RATIO_UNCORRECTED)))
            again = yield from attempt(more, corrected=False, sound=True)
            filled = _instead_of(filled, again, more)
        return replace(filled, artifact_problems=problems)

    def _attempt(
        self,
        layout: PromptLayout,
        library: ChunkLibrary | None,
        known: ChunkCache,
        new_cache: Callable[[], BlendedCache],
        watch: Stopwatch,
        most_rows: MostRows | None,
        config: BlendConfig,
        *,
        corrected: bool,
        sound: bool = False,
    ) -> Steps[Filled]:
        """The steps of a blended prefill: load, reposition, select, recompute. The first token follows in `Blender.steps`."""
        # Load: open the stored entries. From `with loading` on, threads read them layer by layer, ahead of the passes.
        if library is not None:
            yield Resume.BACKGROUND
        with watch.stage("load"):
            opened = self._open(layout, library, contextual=config.surrogate, sound=sound)
        with closing(opened):
            # Reposition: each layer moves to the prompt's positions, and gets its correction, before a pass uses it.
            with watch.stage("reposition"):
                selector = make_selector(config.selector)
                if self.decoder.recurrent and config.ratio < 1:
                    require_whole_chunks(selector)
                adding = corrected and not isinstance(selector, All)
                found = self.corrections.of_prompt(library, opened) if adding and library else Corrections()
                target = self._target(library, opened, config, selector) if adding else None
                uncorrected = self.uncorrected_ratio > 0 and adding and _lacks_correction(opened, found)
                first = config.ratio if target is None else RATIOS[0]
                ratio = max(first, self.uncorrected_ratio) if uncorrected else first
                plan = make_plan(
                    layout,
                    opened.hits,
                    selector,
                    ratio,
                    self.decoder.device,
                    first_exact=opened.first_exact,
                    first_lossless=opened.first_lossless,
                    known=known.tokens,
                    leads=_leads(layout, opened) if self.decoder.recurrent else None,
                    judged=target is not None,
                )
                loading = Assembly(self.decoder, layout, known, opened.readers, new_cache(), found.of_places, watch)
            check = CorrectionCheck(self.decoder, layout, loading.added)
            with loading, loading.cache.watched(check.see) if loading.added else nullcontext():
                rows = Recompute(
                    self.decoder,
                    plan,
                    loading,
                    watch,
                    most_rows=most_rows,
                    on_rows=check.choose,
                    judge=target,
                )
                # Select: the selector chooses rows, as many as the target needs.
                yield from rows.select()
                # Recompute: the decoder runs them over the cache.
                logits = yield from rows.run()
            loading.cache.settle()
        return Filled(
            cache=loading.cache,
            logits=logits,
            selection=rows.selection,
            hits=opened.hits,
            exact_rows=plan.exact_rows(rows.selection.rows),
            missing=opened.missing,
            problems=opened.problems,
            artifact_problems=found.problems,
            correction_fits=check.score() >= 0,
            notes=self._notes(config, ratio, first, adding and any(opened.hits), target),
            bytes_loaded=opened.nbytes,
            uncorrected=uncorrected,
            quality=rows.estimate,
        )

    def _target(
        self, library: ChunkLibrary | None, opened: OpenLibrary, config: BlendConfig, selector: Selector
    ) -> Judge | None:
        """What a prompt with stored chunks is held to; None keeps the ratio."""
        needs = needs_of(selector, len(self.decoder.rotations))
        quality = Quality.of(config)
        if not quality.asked or library is None or needs.query is None or needs.steps != (Step(0),):
            return None
        return self.calibrations.target(library, quality) if any(opened.hits) else None

    def _notes(
        self, config: BlendConfig, ratio: float, first: float, blending: bool, target: Judge | None
    ) -> tuple[str, ...]:
        notes = (_UNCORRECTED.format(ratio),) if ratio > first else ()
        if self.decoder.recurrent and blending and target is None and ratio < LEAD_SHARE:
            notes = (*notes, _LEADS.format(LEAD_SHARE))
        if Quality.of(config).asked and blending and target is None:
            notes = (*notes, _UNCALIBRATED.format(ratio))
        if isinstance(target, Target) and not target.limit:
            notes = (*notes, _UNREACHABLE.format(target.calibration.prompts))
        return notes

    def _open(
        self, layout: PromptLayout, library: ChunkLibrary | None, *, contextual: bool, sound: bool
    ) -> OpenLibrary:
        if library is None:
            nothing = (None,) * len(layout.chunks)
            return OpenLibrary(self.decoder, nothing, nothing, (), (), near=False, exact=False)
        return library.open(layout, contextual=contextual, sound=sound)

    def _check(self, layout: PromptLayout) -> None:
        if not (layout.prefix and layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self.decoder.check_length(layout.rows)
        self.decoder.check_ids(layout.token_ids)

    def keep(self, layout: PromptLayout, missing: Sequence[Variant]) -> int:
        """Compute and store the caches that a prompt missed; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        self.library(layout.kept_behind).compute(missing)
        return len({one.chunk for one in missing})


class Calibrations(Protocol):
    """Gives the judge of a prompt. drift: see `StoredCalibrations`."""

    @property
    def drift(self) -> Drift:
        """Of the estimates."""

    def target(self, library: ChunkLibrary, quality: Quality) -> Judge | None:
        """For this quality; None if nothing can be promised."""


class StoredCalibrations:
    """The calibrations of one store, held in memory while they are current. Threads may share it.

    drift: of the current calibration's estimates, as audits find it. audits: the file that keeps them, under the name `corpus`.
    """

    def __init__(self, store: ChunkStore, audits: Path | None = None, corpus: str = "") -> None:
        self._store, self._lock, self.drift, self._calibration = store, Lock(), Drift(), ""
        self._new_drift = partial(Drift, audits, corpus)
        self._held: LRUCache[tuple[str, Quality], tuple[str, Target | None]] = LRUCache(_MOST_TARGETS)

    def target(self, library: ChunkLibrary, quality: Quality) -> Target | None:
        """For this quality; None if there is no calibration, or it is damaged."""
        name = library.isolated.identity.quality_name
        with self._lock:
            generation, target = self._held.get((name, quality), ("", None))
        if generation != library.generation:
            target = self._read(name, quality)
            with self._lock:
                self._held[name, quality] = library.generation, target
        return target

    def _read(self, name: str, quality: Quality) -> Target | None:
        try:
            content = self._store.read_artifact(name)
            if content is None:
                return None
            calibration, digest = Calibration.from_bytes(content), sha256(content).hexdigest()
            with self._lock:
                if digest != self._calibration:
                    self._calibration, self.drift = digest, self._new_drift(digest)
            return Target.of(quality, calibration, self.drift)
        except (EntryDamagedError, ValueError, TypeError, KeyError):
            return None


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


def _leads(layout: PromptLayout, opened: OpenLibrary) -> list[int]:
    """How many first rows of each place are in the lead of its chunk."""
    return [
        0 if reader is None else reader.lead - layout.first_row(place) for place, reader in enumerate(opened.readers)
    ]


def _lacks_correction(opened: OpenLibrary, found: Corrections) -> bool:
    """Whether a chunk is neither exact nor corrected, as after `--quick`; caches taken in place need no correction."""
    stored = list(zip(opened.used, opened.hits, found.of_places, strict=False))
    rest = stored[int(opened.first_exact) :]
    return any(hit and one is None and used and not used.in_place for used, hit, one in rest)


def _instead_of(first: Filled, again: Filled, more: BlendConfig) -> Filled:
    """The second attempt, charged with the rows of both."""
    spent = [a + b for a, b in zip(first.selection.rows_per_layer, again.selection.rows_per_layer, strict=True)]
    note = f"the KV correction does not fit this prompt: left out, and {more.ratio:.0%} of the rows recomputed instead"
    selection = replace(again.selection, rows_per_layer=tuple(spent))
    return replace(again, correction_fits=False, selection=selection, notes=(note,))


class Blender(Filler):
    """Blended prefill for one HuggingFace decoder over one store.

    Args:
        decoder: the model.
        store: holds the chunk caches.
        config: how rows are chosen, unless a call says otherwise.
        corpus: whose surrogate context and KV corrections are used.

    """

    decoder: Decoder

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
