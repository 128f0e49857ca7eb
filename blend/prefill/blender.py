"""Blended prefill: a prompt's KV from stored chunks, in five steps: open, choose, load, recompute, finish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Generic

from torch import Tensor

from blend.chunks.correction import KVCorrection
from blend.chunks.encode import ChunkEncoder
from blend.chunks.fit import fit_corrections
from blend.config import BlendConfig
from blend.errors import EntryDamagedError, PromptError
from blend.layout import PromptLayout, Tokens
from blend.model.passes import Resume, RowRequest, Steps, run_steps
from blend.prefill.prefill import LEAST_RATIO_UNCORRECTED, Attempt, Prefill
from blend.prefill.progress import PrefillProgress
from blend.prefill.resources import (
    NOTHING_MOVED,
    BlenderParts,
    DecoderT_co,
    MostRows,
    MovedRows,
    NewCache,
    PromptInputs,
)
from blend.quality import Estimate
from blend.stopwatch import Progress, Stopwatch, no_progress
from blend.store.base import ChunkStore
from blend.types import CacheKey, CacheKind, ChunkCache, Selection

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder
    from blend.prefill.plan import Plan


@dataclass(frozen=True)
class Blend(Generic[DecoderT_co]):
    """A finished prefill: a prompt's cache, put together from stored chunks and recomputed.

    Attributes:
        decoder: the model that computed it.
        layout: the prompt.
        plan: which rows could be recomputed.
        cache: KV of the whole prompt, ready for decoding.
        logits: for the next token, `[1, vocab]`.
        first_token: the token with the highest logit; -1 where an engine computes the logits itself.
        selection: the rows that were recomputed.
        hits: which places came out of the store; False for ordinary text.
        missing: caches that the store should have held.
        problems: one line for every chunk entry that was refused.
        artifact_problems: the same for surrogate contexts and KV corrections, which were then left out.
        correction_fits: False if the KV corrections were left out for this prompt and more rows recomputed.
        notes: one line for everything that was done differently than configured.
        bytes_loaded: bytes of stored KV that were used.
        uncorrected: whether stored rows were used as they are, because there is no KV correction.
        quality: the expected KL to full recompute, if a quality was asked for and the store has an estimator.
        stages: seconds per stage (`blend.stopwatch.STAGES`).
        ttft_s: seconds from the call to the first token's id on the host.

    """

    decoder: DecoderT_co
    layout: PromptLayout
    plan: Plan
    cache: BlendedCache
    logits: Tensor
    first_token: int
    selection: Selection
    hits: tuple[bool, ...]
    missing: tuple[CacheKey, ...]
    problems: tuple[str, ...]
    artifact_problems: tuple[str, ...]
    correction_fits: bool
    notes: tuple[str, ...]
    bytes_loaded: int
    uncorrected: bool
    quality: Estimate | None
    stages: Mapping[str, float]
    ttft_s: float

    @cached_property
    def exact_rows(self) -> int:
        """How many of the first rows have the KV that full prefill gives."""
        return self.plan.exact_rows(self.selection.rows.cpu().numpy())

    @property
    def rows_recomputed(self) -> int:
        """Rows that were computed in every layer."""
        return int(self.selection.rows.shape[0])

    @property
    def rows_share(self) -> float:
        """Computed rows, summed over layers, as a share of full prefill's."""
        return self.selection.share(self.layout.rows)

    def append(self: Blend[Decoder], token_ids: Tensor) -> Tensor:
        """Run further tokens `[1, n]` behind the prompt.

        Returns:
            Logits `[1, n, vocab]`.

        """
        return self.decoder.append(token_ids, self.cache)

    def rewind(self) -> None:
        """Forget everything that was appended to the prompt."""
        self.cache.truncate(self.layout.rows)


class Blender(BlenderParts[DecoderT_co]):
    """Blended prefill for one decoder over one store.

    >>> from blend import BlendConfig, Blender, Decoder, PromptTemplate, open_store
    >>> decoder = Decoder.load("my-model")
    >>> blender = Blender(decoder, open_store("memory:"), BlendConfig(ratio=0.15))
    >>> passages = [Passage(place, f"The {place} has gates and a bell. " * 9) for place in ("harbour", "market", "quarry")]
    >>> template = PromptTemplate(decoder.tokenizer)
    >>> first = blender.prefill(template.layout("How many gates?", passages))
    >>> blender.remember(first)  # computes and stores the caches that this prompt lacked
    3
    >>> second = blender.prefill(template.layout("Is there a bell?", passages[::-1]))
    >>> first.hits, second.hits, second.rows_share < first.rows_share
    ((False, False, False), (True, True, True), True)

    Args:
        decoder: the model.
        store: holds the chunk caches.
        config: how rows are chosen, unless a call says otherwise.
        corpus: the corpus whose surrogate context and KV corrections are used.
        uncorrected_ratio: least share of rows to recompute while the store has no KV correction for its caches.

    """

    def __init__(
        self,
        decoder: DecoderT_co,
        store: ChunkStore,
        config: BlendConfig | None = None,
        *,
        corpus: str = "",
        uncorrected_ratio: float = 0.0,
    ) -> None:
        super().__init__(decoder, store, corpus, uncorrected_ratio)
        self.config = config or BlendConfig()

    def correction(self, prefix: Tokens, kind: CacheKind = CacheKind.ISOLATED) -> KVCorrection | None:
        """The KV correction for isolated or contextual caches, from memory or the store.

        None if none was measured, if it is damaged, or if nothing is computed in context.
        """
        return self.corrections.held(self.library(prefix), kind).map

    def calibrate(
        self,
        prefix: Tokens,
        chunks: Sequence[Tokens],
        *,
        anew: bool = False,
        provisional: bool = False,
        progress: Progress = no_progress,
    ) -> bool:
        """Measure and store the KV corrections behind `prefix`, on prompts made of some of these chunks.

        Args:
            prefix: the prompts' prefix.
            chunks: of the corpus.
            anew: measure again even if the store has corrections.
            provisional: the chunks are not the corpus's; measure only what the store lacks. A later call with the corpus's
                chunks replaces it.
            progress: called with the stage "calibrate".

        Returns:
            Whether there is a correction now.

        Raises:
            StoreError: the store cannot be written.

        """
        library = self.library(prefix)
        kinds = [*CacheKind] if library.contextual else [CacheKind.ISOLATED]
        corrections = {kind: self.corrections.held(library, kind).map for kind in kinds}
        replaces = not provisional and any(correction.provisional for correction in corrections.values() if correction)
        anew = anew or replaces
        lacking = [kind for kind in kinds if anew or not corrections[kind]]
        fits = fit_corrections(library, chunks, lacking, progress) if lacking else []
        for kind, fit in zip(lacking, fits, strict=True):
            name = library.encoder(kind).identity.correction_name
            if provisional and self.store.read_artifact(name) is not None:  # fitted meanwhile, on the corpus
                continue
            if fit is not None:
                self.store.write_artifact(name, replace(fit, provisional=provisional).to_bytes())
            elif anew:  # one of other chunks must not stay
                self.store.delete_artifact(name)
        return any(self.correction(prefix, kind) for kind in kinds)

    def prefill(
        self: Blender[Decoder],
        layout: PromptLayout,
        *,
        config: BlendConfig | None = None,
        room: int = 256,
        watch: Stopwatch | None = None,
        known: ChunkCache | None = None,
    ) -> Blend:
        """Prefill a prompt from stored chunks.

        Damaged store entries are recomputed, never raised.

        Args:
            layout: the prompt.
            config: how rows are chosen; by default the blender's.
            room: tokens to reserve for decoding.
            watch: a stopwatch that runs since the query arrived, if that was earlier.
            known: KV of the prefix, or of its first rows; the rest is computed.

        Returns:
            The prompt's KV, its first token, and what it cost.

        Raises:
            PromptError: the prompt does not fit the model.
            ConfigError: the selector breaks its contract.
            StoreError: the store cannot be read.

        """
        config = config or self.config
        watch = watch or Stopwatch(self.decoder.device)

        def run(request: RowRequest) -> Tensor:
            with self.decoder.before_head(partial(watch.switch, "first_token")):
                return self.decoder.prefill([replace(request, mask=config.mask)])

        steps = self.steps(layout, config=config, room=room, watch=watch, known=known)
        return run_steps(steps, run)

    def steps(
        self,
        layout: PromptLayout,
        *,
        config: BlendConfig | None = None,
        room: int = 256,
        watch: Stopwatch | None = None,
        most_rows: MostRows | None = None,
        known: ChunkCache | None = None,
        new_cache: NewCache | None = None,
        needs_hit: bool = False,
        moved: MovedRows = NOTHING_MOVED,
        watcher: Callable[[PrefillProgress], None] = lambda _: None,
    ) -> Steps[Blend[DecoderT_co]]:
        """`prefill` for a scheduler that interleaves prompts, in one `Attempt` or several; see `Steps` for how to drive it.

        Args:
            layout: the prompt.
            config: as in `prefill`.
            room: as in `prefill`.
            watch: as in `prefill`.
            most_rows: rows of a pass at most; stored layers are then in place before a pass that other prompts share.
            known: as in `prefill`.
            new_cache: what the rows are written to; by default a cache of the decoder.
            needs_hit: raise `NothingStoredError` where the store holds none of the chunks, before anything is computed.
            moved: the rows of the layout's `MOVED` places.
            watcher: gets each attempt when it begins, to ask how far it is.
        """
        layout = self._checked(layout)
        config, watch = config or self.config, watch or Stopwatch(self.decoder.device)
        encoder = self.encoder(layout.kept_behind)
        if known is None and layout.shared_prefix_rows and not encoder.has_prefix:
            yield Resume.NEXT_TURN
        make_cache = partial(new_cache or self.decoder.new_cache, layout.rows + room)
        prompt = PromptInputs(
            layout, self._beginning(layout, encoder, known), make_cache, watch, most_rows, needs_hit, moved
        )
        attempt = Attempt(config, config.correction)
        while True:
            if prompt.uses_store:
                yield Resume.BACKGROUND
            try:
                with Prefill(self, prompt, attempt) as prefill:
                    watcher(PrefillProgress(prefill))
                    yield from _run_attempt(prefill)
            except EntryDamagedError as error:
                attempt = _on_verified_entries(attempt, error)
                continue
            first_token, fits = prefill.read_result()
            if fits or not attempt.corrected:
                return self._blend(prefill, first_token)
            attempt = _without_correction(prefill)

    def _checked(self, layout: PromptLayout) -> PromptLayout:
        """The prompt as this decoder prefills it with its present weights. Raises `PromptError` if it does not fit."""
        self.follow_weights()
        if not (layout.prefix and layout.suffix):
            raise PromptError("the prompt needs a prefix and a suffix of at least one token each; see PromptTemplate")
        self.decoder.check_length(layout.rows)
        self.decoder.check_ids(layout.token_ids)
        return layout.composable() if self.decoder.recurrent else layout

    def _beginning(self, layout: PromptLayout, encoder: ChunkEncoder, beginning: ChunkCache | None) -> ChunkCache:
        """KV of the first rows of the prompt."""
        if beginning is None and layout.shared_prefix_rows:
            beginning = encoder.prefix.rows(0, layout.shared_prefix_rows)
        if beginning is None or (self.decoder.recurrent and not beginning.states):
            return self.decoder.no_rows()
        return beginning

    def _blend(self, prefill: Prefill, first_token: int) -> Blend[DecoderT_co]:
        """What an attempt made."""
        opened = prefill.opened
        attempt = prefill.attempt
        prompt = prefill.prompt
        library = prefill.library
        assert prefill.logits is not None
        opened.count()
        first = attempt.instead_of or prefill
        surrogate_problems = library.problems if library and attempt.config.surrogate else ()
        return Blend(
            decoder=self.decoder,
            layout=prompt.layout,
            plan=prefill.plan,
            cache=prefill.cache,
            logits=prefill.logits,
            first_token=first_token,
            selection=prefill.selection,
            hits=opened.hits,
            missing=opened.missing,
            problems=opened.problems,
            artifact_problems=(*surrogate_problems, *first.problems),
            correction_fits=attempt.instead_of is None,
            notes=prefill.notes,
            bytes_loaded=opened.nbytes,
            uncorrected=prefill.uncorrected,
            quality=prefill.estimate,
            stages=prompt.watch.stages,
            ttft_s=prompt.watch.total(),
        )

    def keep(self, layout: PromptLayout, missing: Sequence[CacheKey]) -> int:
        """Compute and store the caches that a prompt missed; how many chunks they are of.

        Raises `StoreError` when the store cannot be written.
        """
        self.follow_weights()
        self.library(layout.kept_behind).compute(missing)
        return len({key.chunk for key in missing})

    def remember(self, blend: Blend[DecoderT_co]) -> int:
        """Compute and store the caches that `blend` missed, so that the next prompt finds them.

        Returns:
            How many chunks they are of; 0 with `BlendConfig.reproducible`, which stores none.

        Raises:
            StoreError: the store cannot be written.

        """
        return 0 if self.config.reproducible else self.keep(blend.layout, blend.missing)


def _run_attempt(prefill: Prefill) -> Steps[None]:
    """Load, choose and recompute rows, and finish."""
    yield from prefill.rows_ahead()
    yield from prefill.layers_to_load()
    prefill.ask()
    yield prefill.resume
    prefill.look()
    for request in prefill.question_rows():
        prefill.question_logits = yield request
    prefill.choose()
    for request in prefill.chosen_rows():
        prefill.logits = yield request
    prefill.finish()


def _on_verified_entries(attempt: Attempt, error: EntryDamagedError) -> Attempt:
    """The same again, after an entry turned out to be damaged. Raises the error if they were verified already."""
    if attempt.sound:
        raise error
    return attempt._replace(sound=True)


def _without_correction(prefill: Prefill) -> Attempt:
    """Another attempt on more rows, because the KV correction did not fit the prompt. Frees the cache of this one."""
    prefill.cache.free()  # a prompt gets memory for one cache
    config = prefill.attempt.config
    ratio = min(1.0, max(2 * config.ratio, LEAST_RATIO_UNCORRECTED))
    return Attempt(replace(config, ratio=ratio), corrected=False, sound=True, instead_of=prefill)
