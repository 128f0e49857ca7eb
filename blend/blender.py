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
from blend.model.decoder import check_ids
from blend.model.forward import Resume, RowRequest, Steps
from blend.recompute import MostRows, make_plan, recompute
from blend.select import make_selector
from blend.select.selectors import All
from blend.store import open_store
from blend.store.base import ChunkStore
from blend.timing import Progress, Stopwatch, no_progress
from blend.types import ChunkCache, PromptLayout, Selection

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder, RowDecoder


_Result = TypeVar("_Result")
NewCache = Callable[[int], "BlendedCache"]
"""An empty cache for a prompt, with room for so many rows."""

MOST_PREFIXES = 16  # whose libraries are kept, each with the prefix's own KV: a prompt a user may have one of its own
_UNCORRECTED = "there is no KV correction for these caches yet: {:.0%} of the rows recomputed"
LEAST_RATIO_UNCORRECTED = 0.3  # of rows, where there is no KV correction yet, or it turns out not to fit a prompt


class Filled(NamedTuple):
    """A prompt put together and recomputed.

    logits: what was sent for the last rows. fits: whether the KV correction did no harm to the rows where that shows. problems:
    a line for every artifact that had to be refused. exact_rows, notes: see `Blend`. uncorrected: whether stored rows were used
    as they are, because there is no KV correction for them yet.
    """

    cache: BlendedCache
    logits: torch.Tensor
    selection: Selection
    fits: bool
    problems: tuple[str, ...]
    placed: Placed
    exact_rows: int
    notes: tuple[str, ...] = ()
    uncorrected: bool = False


class Filler:
    """Fills the caches of prompts from one store, for one decoder.

    config: how rows are chosen, unless a call says otherwise. corpus: whose surrogate context and KV corrections are used.
    careful: whether more rows are recomputed as long as there is no KV correction for what the store holds.
    """

    def __init__(
        self,
        decoder: RowDecoder,
        store: ChunkStore,
        config: BlendConfig | None = None,
        *,
        corpus: str = "",
        careful: bool = False,
    ) -> None:
        self.careful = careful
        self.decoder = decoder
        self.store = store
        self.corpus = corpus
        self.config = config or BlendConfig()
        self._libraries: dict[Tokens, ChunkLibrary] = {}
        self._unasked: dict[Tokens, ChunkLibrary] = {}
        self._corrections = StoredCorrections(decoder, store)

    def library(self, prefix: Tokens) -> ChunkLibrary:
        """The caches of chunks behind this prefix, as the store stands now."""
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
        """For a prompt. One that takes nothing from the store does not ask it either, and works while it is out of reach."""
        prefix = layout.kept_behind
        if _asks_store(layout):
            return self.library(prefix)
        held = self._libraries.get(prefix) or self._unasked.get(prefix)
        if held is None:
            held = ChunkLibrary(self.decoder, open_store("memory:"), prefix, corpus=self.corpus)
            _keep(self._unasked, prefix, held)
        return held

    def read_ahead(self, layout: PromptLayout) -> None:
        """The caches of this prompt's chunks will be wanted soon: into memory with them, where the store has such a tier."""
        self.library(layout.kept_behind).read_ahead([chunk for chunk in layout.stored if chunk is not None])

    def encoder(self, prefix: Tokens) -> ChunkEncoder:
        """The encoder of chunks alone behind this prefix; the prefix's own KV is computed when it is first needed."""
        return self.library(prefix).isolated

    def correction(self, prefix: Tokens, *, contextual: bool = False, first: bool = False) -> KVCorrection | None:
        """The KV correction for isolated or contextual caches, from memory or the store; first: in a prompt's first place.

        None where none was measured, none is needed because nothing is computed in context or what stands there is exact, or it
        is damaged.
        """
        return self._corrections.held(self.library(prefix), contextual=contextual, first=first).map

    def calibrate(
        self,
        prefix: Tokens,
        chunks: Sequence[Tokens],
        *,
        anew: bool = False,
        progress: Progress = no_progress,
    ) -> bool:
        """Measure and store the KV corrections behind `prefix` on prompts made of some of these chunks.

        Those that are there stay, unless they are to be measured `anew`. progress: of the stage "calibrate". Returns
        whether there is one now. Raises `StoreError` when the store cannot be written.
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
        """Yields rows to run, is sent what the last of them gives, and ends with the prompt's cache; see `Blender.steps`.

        new_cache: what the prompt's rows are written to; by default the decoder's own. Close it when it is given up.
        Raises `PromptError` for a prompt that does not fit the model, `ConfigError` for a selector that breaks its contract.
        """
        if not (layout.prefix and layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self.decoder.check_length(layout.rows)
        check_ids(self.decoder.vocabulary, layout.token_ids)
        if _asks_store(layout):
            yield Resume.BESIDE
        library = self._library_of(layout)
        if known is None and layout.shared_prefix_rows:
            if not library.isolated.has_prefix:
                yield Resume.TURN
            known = library.isolated.prefix.rows(0, layout.shared_prefix_rows)
        known = known or self.decoder.no_rows()
        make = partial(new_cache or self.decoder.new_cache, layout.rows + room)
        run = partial(self._pass, layout, known, make, watch=watch, most_rows=most_rows)
        try:
            first = yield from run(library.open, config, corrected=config.correction)
        except EntryDamagedError:  # found while a layer was read: once more, with everything verified beforehand
            first = yield from run(library.open_sound, config, corrected=config.correction)
        problems = (*(library.problems if config.surrogate else ()), *first.problems)
        if first.fits:
            return first._replace(problems=problems)
        first.cache.free()  # before there is a second one: a prompt is given memory for one
        more = _with_more_rows(config)
        again = yield from run(library.open_sound, more, corrected=False)
        return _instead_of(first, again, more)._replace(problems=problems)

    def _pass(
        self,
        layout: PromptLayout,
        known: ChunkCache,
        new_cache: Callable[[], BlendedCache],
        opener: Opener,
        config: BlendConfig,
        *,
        watch: Stopwatch,
        most_rows: MostRows | None,
        corrected: bool,
    ) -> Steps[Filled]:
        """Put the stored chunks in place, with or without the KV correction, and recompute."""
        if _asks_store(layout):
            yield Resume.BESIDE
        with watch.stage("load"):
            placed = place(layout, opener, contextual=config.surrogate)
        with closing(placed):
            with watch.stage("reposition"):
                selector = make_selector(config.selector)
                adding = corrected and not isinstance(selector, All)
                found = self.corrections(placed) if adding else Corrections((), ())
                uncorrected = self.careful and adding and _uncorrected(placed, found)
                ratio = max(config.ratio, LEAST_RATIO_UNCORRECTED) if uncorrected else config.ratio
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
                assembly = Assembly(self.decoder, layout, known, placed.readers, new_cache(), found.of_chunks, watch)
            check = CorrectionCheck(self.decoder, layout, assembly.added)
            with assembly, assembly.cache.watched(check.see) if assembly.added else nullcontext():
                found_rows = recompute(
                    self.decoder, assembly.cache, plan, watch=watch, most_rows=most_rows, on_rows=check.choose
                )
                logits, selection = yield from found_rows
        return Filled(
            assembly.cache,
            logits,
            selection,
            check.score() >= 0,
            found.problems,
            placed,
            plan.exact_rows(selection.rows),
            (_UNCORRECTED.format(ratio),) if ratio > config.ratio else (),
            uncorrected,
        )

    def corrections(self, placed: Placed) -> Corrections:
        """The KV correction for each place of a prompt; none for a first chunk that is exact where it stands."""
        found = self._corrections.of_prompt(placed.opened, first=placed.first)
        return found._replace(of_chunks=placed.spread(found.of_chunks))

    def keep(self, layout: PromptLayout, missing: Sequence[Variant]) -> int:
        """Compute and store caches that a prompt lacked, so that the next one hits; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        self.library(layout.kept_behind).compute(missing)
        return len({one.chunk for one in missing})


def run_steps(steps: Steps[_Result], run: Callable[[RowRequest], torch.Tensor]) -> _Result:
    """Run rows one after another until there is a result; what is found damaged on the way is told to `steps`."""
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
    """Whether anything of a prompt may be in the store."""
    return any(chunk is not None for chunk in layout.stored)


def _with_more_rows(config: BlendConfig) -> BlendConfig:
    """For another attempt, from the stored values: the KV correction took the rows seen further from the truth."""
    return replace(config, ratio=min(1.0, max(2 * config.ratio, LEAST_RATIO_UNCORRECTED)))


def _uncorrected(placed: Placed, found: Corrections) -> bool:
    """Whether a stored chunk is neither exact nor corrected, as after `--quick`, and soon after a text was learned."""
    stored = list(zip(placed.hits, found.of_chunks, strict=True))
    return any(hit and one is None for hit, one in stored[int(placed.first_exact) :])


def _instead_of(first: Filled, again: Filled, more: BlendConfig) -> Filled:
    """The second attempt, charged with the rows of both."""
    spent = [a + b for a, b in zip(first.selection.rows_per_layer, again.selection.rows_per_layer, strict=True)]
    note = f"the KV correction does not fit this prompt: left out, and {more.ratio:.0%} of the rows recomputed instead"
    return again._replace(fits=False, selection=replace(again.selection, rows_per_layer=tuple(spent)), notes=(note,))


def _keep(libraries: dict[Tokens, ChunkLibrary], prefix: Tokens, library: ChunkLibrary) -> None:
    """It and those that were asked for last."""
    libraries.pop(prefix, None)
    libraries[prefix] = library
    for oldest in list(libraries)[:-MOST_PREFIXES]:
        libraries.pop(oldest, None)


@dataclass(frozen=True)
class Blend:
    """A finished prefill.

    cache: KV of the whole prompt, ready for decoding. logits: of the next token, `[1, vocab]`. first_token: their argmax.
    hits: which chunks came out of the store, False for ordinary text. exact_rows: of so many of the first rows the KV is what
    full prefill gives. missing: caches that it should have held. problems: one line for every chunk's
    entry that had to be refused. artifact_problems: the same for surrogate context and KV corrections, without which it was
    then blended. correction_fits: False where the KV corrections were left out for this prompt, and more rows recomputed.
    notes: what was done otherwise than configured, a line each. stages: seconds per stage. ttft_s: seconds from the call to
    the first token's id on the host. bytes_loaded: bytes of stored KV that were read.
    """

    decoder: Decoder
    layout: PromptLayout
    cache: BlendedCache
    logits: torch.Tensor
    first_token: int
    selection: Selection
    hits: tuple[bool, ...]
    exact_rows: int
    missing: tuple[Variant, ...]
    problems: tuple[str, ...]
    artifact_problems: tuple[str, ...]
    correction_fits: bool
    notes: tuple[str, ...]
    stages: Mapping[str, float]
    ttft_s: float
    bytes_loaded: int

    @property
    def rows_recomputed(self) -> int:
        """Rows that were computed in every layer."""
        return int(self.selection.rows.shape[0])

    @property
    def rows_share(self) -> float:
        """Computed rows, summed over layers, over all rows x layers: what compute costs beside full prefill."""
        return self.selection.share(self.layout.rows)

    def append(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Run further tokens `[1, n]` behind the prompt; logits `[1, n, vocab]`."""
        return self.decoder.append(token_ids, self.cache)

    def rewind(self) -> None:
        """Forget everything that was appended to the prompt."""
        self.cache.truncate(self.layout.rows)


class Blender(Filler):
    """Blended prefill for one decoder over one store.

    config: how rows are chosen, unless a call says otherwise. corpus: whose surrogate context and KV corrections are used.
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

        room: tokens to reserve for decoding. watch: a stopwatch that runs since the query's arrival, if it came earlier.
        Raises `PromptError` when the prompt does not fit the model, `ConfigError` for a selector that breaks its contract.
        Damaged store entries are recomputed, never raised.
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
        """`prefill` for a scheduler: yields rows for `Decoder.prefill`, is sent their logits, ends with the `Blend`.

        The rows may run in one pass with rows of other prompts, whose answers then need not wait; nor need they where it yields
        a `Resume`. most_rows: see there; stored layers are then in place before the first that reads them. known: KV of the
        prefix, or of its first rows, where that is at hand; the rest is computed first. An `EntryDamagedError` that running the
        rows raised is to be thrown in. Close it when it is given up, which may wait for the store too. Raises as `prefill`.
        """
        watch = watch or Stopwatch(self.decoder.device)
        config = config or self.config
        filled = yield from self.fill(layout, config=config, room=room, watch=watch, most_rows=most_rows, known=known)
        with watch.stage("first_token"):
            first_token = int(filled.logits[0].argmax())
        opened = filled.placed.opened
        return Blend(
            decoder=self.decoder,
            layout=layout,
            cache=filled.cache,
            logits=filled.logits,
            first_token=first_token,
            selection=filled.selection,
            hits=filled.placed.hits,
            exact_rows=filled.exact_rows,
            missing=opened.missing,
            problems=opened.problems,
            artifact_problems=filled.problems,
            correction_fits=filled.fits,
            notes=filled.notes,
            stages=dict(watch.stages),
            ttft_s=watch.total(),
            bytes_loaded=opened.nbytes,
        )

    def remember(self, blend: Blend) -> int:
        """Compute and store the caches that `blend` missed, so that the next prompt hits; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        return self.keep(blend.layout, blend.missing)
