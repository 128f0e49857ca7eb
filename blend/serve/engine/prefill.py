"""The prefill of one prompt in the engine: finds its beginning in memory, and blends or computes the rest in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blend.checked import UNCHECKED
from blend.errors import StoreError
from blend.model.passes import Resume, Steps
from blend.prefill.inputs import NOTHING_MOVED, MovedRows
from blend.quality import Estimate, Quality
from blend.serve.engine.background import Stepper
from blend.serve.engine.moved import moved
from blend.serve.engine.savings import exact_anyway, is_blendable, reason_against
from blend.serve.events import BLENDED_BEFORE, IN_MEMORY, ONLY_PARTS
from blend.serve.failures import STORE_UNREACHABLE, is_outage
from blend.serve.prompt import ASKED_FOR, Prompt

if TYPE_CHECKING:
    from blend.prefill.blender import Blend, Blender
    from blend.serve.engine.background import IOPool
    from blend.serve.engine.prefixes import CachedPrefix, PrefixCache
    from blend.types import ChunkCache, Stopwatch


class _RestartError(Exception):
    """Thrown into a prefill that is to begin anew."""


class PromptPrefill(Stepper["Blend"]):
    """Drives the prefill of a prompt.

    Args:
        prefixes: finds the prompt's beginning.
        io: pool for calls that may wait for the store.
        watch: times its stages.
        least_gain: see `reason_against`.

    Attributes:
        quality: what the prompt asks for.
        reason: why it is computed in full, or "".
        reused: first rows that came from memory.
        inexact: how many of them, from the first blended one on.
        estimate: of the inexact rows.
        first_rows: KV of the reused rows; None for the blender's own prefix. Not needed once it has ended.
        most_rows: of pieces from now on.

    """

    def __init__(
        self,
        prompt: Prompt,
        blender: Blender,
        prefixes: PrefixCache,
        io: IOPool,
        watch: Stopwatch,
        *,
        least_gain: int,
    ) -> None:
        super().__init__(self._prefilling(), io)
        self._prompt = prompt
        self._blender = blender
        self._watch = watch
        self._least_gain = least_gain
        self._config = prompt.config or blender.config
        self._recurrent = bool(blender.decoder.recurrent)
        self.quality = Quality.of(self._config)
        self.reason = ""
        self.inexact = 0
        self.estimate: Estimate | None = None
        self.first_rows: ChunkCache | None = None
        layout = prompt.layout
        if prompt.request.cold:
            self.reused = 0
            self.first_rows = blender.decoder.no_rows()
        elif (prefix := self._beginning(prefixes)) is not None:
            self.reused = prefix.cache.tokens
            self.inexact = self.reused - prefix.exact_rows
            self.estimate = prefix.estimate if self.inexact else None
            self.first_rows = prefix.cache
        else:
            whole = layout.shared_prefix_rows == len(layout.kept_behind)
            self.reused = layout.shared_prefix_rows if whole or not self._recurrent else 0
        behind = layout.behind(self.reused) if self.reused > len(layout.prefix) else layout
        self._layout = behind.composable() if self._recurrent else behind  # the reused rows are its prefix
        self._moved = self._move(prefixes) if self._may_move else NOTHING_MOVED
        self.most_rows = 0
        self._restarted = False

    def restart(self, error: Exception) -> None:
        """Begin anew after a pass failed, once: a selector cannot forget what it saw. Raises `error` if that is in vain."""
        if self._restarted or isinstance(error, StoreError):
            raise error
        self._restarted = True
        self.failed(_RestartError())

    def _beginning(self, prefixes: PrefixCache) -> CachedPrefix | None:
        """The prompt's beginning in the prefix cache, if that is more than the blender's own prefix."""
        layout = self._prompt.layout
        exact_only = self._prompt.full_because == ASKED_FOR
        quality = None if exact_only else self.quality
        prefix = prefixes.find(self._prompt.request.tenant, layout.token_ids, quality)
        if prefix is not None and len(layout.prefix) < prefix.cache.tokens <= exact_anyway(layout):
            prefix = prefix.first(len(layout.prefix))
        if prefix is None or prefix.cache.tokens <= layout.shared_prefix_rows:
            return None
        return None if self._recurrent and not prefix.cache.states else prefix

    @property
    def _may_move(self) -> bool:
        """Whether rows of earlier prompts may move: no quality is promised for them, and a recurrent state does not move."""
        prompt = self._prompt
        return not (prompt.full_because or prompt.request.cold or self.quality.asked or self._recurrent)

    def _move(self, prefixes: PrefixCache) -> MovedRows:
        """Take places out of the latest prompt of the end user that holds enough of this one."""
        ids = self._prompt.layout.token_ids
        for earlier in prefixes.latest(self._prompt.request.tenant, self._prompt.author):
            goes_on = len(earlier.prompt) < len(ids) and ids[: len(earlier.prompt)] == earlier.prompt
            if goes_on or not self._layout.places:
                break  # all behind the reused rows is new
            prompt = moved(self._layout, earlier.ids)
            rows = prefixes.rows_of(earlier, prompt.begin, prompt.end) if prompt is not None else None
            if prompt is not None and rows is not None:
                self._layout = prompt.layout
                return MovedRows(rows, prompt.edited)
        return NOTHING_MOVED

    def _prefilling(self) -> Steps[Blend]:
        """Decide whether to blend, then load, select and compute."""
        try:
            self.reason = self._prompt.full_because or self._nothing_to_blend()
            if not self.reason:
                yield Resume.BACKGROUND
                self.reason = reason_against(self._blender, self._layout, self._config, self._least_gain)
        except StoreError as error:
            self._fall_back(error)
        while True:
            try:
                return (yield from self._blending())
            except StoreError as error:
                self._fall_back(error)
            except _RestartError:
                pass

    def _blending(self) -> Steps[Blend]:
        return self._blender.steps(
            self._layout.all_plain() if self.reason else self._layout,
            config=self._config,
            room=self._prompt.sampling.max_tokens,
            watch=self._watch,
            most_rows=lambda: self.most_rows,
            known=self.first_rows,
            moved=NOTHING_MOVED if self.reason else self._moved,
        )

    def _fall_back(self, error: StoreError) -> None:
        """Compute everything when the store is unreachable. Raises any other error."""
        if not is_outage(error) or self.reason == STORE_UNREACHABLE:
            raise error
        self.reason = STORE_UNREACHABLE

    def _nothing_to_blend(self) -> str:
        """Why nothing is left to blend behind the reused rows, or ""."""
        layout = self._prompt.layout
        if is_blendable(self._layout):
            return "" if self._blender.trusted else UNCHECKED
        if self.inexact:
            return BLENDED_BEFORE
        if self._recurrent and is_blendable(layout) and not is_blendable(layout.composable()):
            return ONLY_PARTS
        return IN_MEMORY if is_blendable(layout) or self.reused == layout.rows - 1 else ""
