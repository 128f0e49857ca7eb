"""The KV corrections of a store: held in memory as long as they are current, measured, and told chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.correction import KVCorrection
from blend.chunks.fit_correction import Source, fit_corrections
from blend.chunks.fit_first import fit_first
from blend.errors import EntryDamagedError
from blend.timing import Progress, no_progress

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.chunks.open_library import OpenLibrary, Tokens
    from blend.model.decoder import RowDecoder
    from blend.store.base import ChunkStore


class Corrections(NamedTuple):
    """For each chunk of a prompt what is to be added to it, or None; a line for every KV correction that had to be refused."""

    of_chunks: tuple[KVCorrection | None, ...]
    problems: tuple[str, ...]


class HeldCorrection(NamedTuple):
    """What a store held at one generation under a correction's name, and the line for one that had to be refused."""

    map: KVCorrection | None
    problems: tuple[str, ...]
    generation: str


class StoredCorrections:
    """Those of one decoder in one store."""

    def __init__(self, decoder: RowDecoder, store: ChunkStore) -> None:
        self.decoder = decoder
        self.store = store
        self._held: dict[str, HeldCorrection] = {}

    def held(self, library: ChunkLibrary, *, contextual: bool, first: bool = False) -> HeldCorrection:
        """For isolated or contextual caches, from memory or the store; first: in a prompt's first place."""
        name = library.correction_name(contextual=contextual, first=first)
        if name is None:
            return HeldCorrection(None, (), library.generation)
        held = self._held.get(name)
        if held is None or held.generation != library.generation:
            self._held[name] = held = self._read(name, library.generation)
        return held

    def of_prompt(self, opened: OpenLibrary, *, first: bool = True) -> Corrections:
        """The KV correction of each chunk of a prompt as it is stored; none for a first one that is exact where it stands.

        first: whether the first of them stands in a prompt's first place.
        """
        kinds = [(one.contextual, first and place == 0) for place, one in enumerate(opened.used)]
        held = {
            (contextual, first): self.held(opened.library, contextual=contextual, first=first)
            for contextual, first in sorted(set(kinds))
        }
        of_chunks = [held[kind].map if hit else None for kind, hit in zip(kinds, opened.hits, strict=True)]
        return Corrections(tuple(of_chunks), tuple(line for one in held.values() for line in one.problems))

    def measure(
        self, library: ChunkLibrary, chunks: Sequence[Tokens], *, anew: bool = False, progress: Progress = no_progress
    ) -> bool:
        """See `Blender.calibrate`."""
        behind = self._measure_behind(library, chunks, anew=anew, progress=progress)
        return self._measure_first(library, chunks, anew=anew, progress=progress) or behind

    def _measure_behind(
        self, library: ChunkLibrary, chunks: Sequence[Tokens], *, anew: bool, progress: Progress
    ) -> bool:
        """The maps of chunks that stand behind others."""
        kinds = (False, True) if library.contextual else (False,)
        if not anew and all(self.held(library, contextual=contextual).map for contextual in kinds):
            return True
        together = {one.chunk for one in library.variants(chunks) if one.contextual}
        sources = [
            Source(
                partial(library.caches, contextual=contextual),
                together.__contains__ if contextual else lambda chunk: True,
            )
            for contextual in kinds
        ]
        fits = fit_corrections(library.isolated, chunks, sources, progress)
        names = [library.encoder(contextual=contextual).identity.correction_name for contextual in kinds]
        self._keep(library, dict(zip(names, fits, strict=True)), anew=anew)
        return any(self.held(library.renewed(), contextual=contextual).map for contextual in kinds)

    def _measure_first(
        self, library: ChunkLibrary, chunks: Sequence[Tokens], *, anew: bool, progress: Progress
    ) -> bool:
        """The map of contextual caches in the first place; of a corpus in two copies none stays that would be out of date."""
        if library.contextual is None:
            return False
        name = library.contextual.identity.first_correction_name
        if library.one_copy and not anew and self.held(library, contextual=True, first=True).map:
            return True
        found = None
        if library.one_copy:
            mine = [one.chunk for one in library.variants(chunks) if one.contextual]
            caches = (partial(library.caches, contextual=True), partial(library.caches, contextual=False))
            found = fit_first(self.decoder, library.prefix, mine, caches, progress)
        return self._keep(library, {name: found}, anew=anew) and found is not None

    def _keep(self, library: ChunkLibrary, fits: Mapping[str, KVCorrection | None], *, anew: bool) -> bool:
        """Keep what was measured, by names; whether it is still of the caches that the corpus has.

        Another process may have decided anew during the minutes that it took: on another surrogate context, or other copies.
        What that measures stays then. The generation alone tells nothing: every corpus of the store and every map moves it.
        """
        if not (anew or any(fits.values())):
            return True
        with self.store.writing():
            now = library.reread()
            if (now.surrogate, now.one_copy) != (library.surrogate, library.one_copy):
                return False
            for name, found in fits.items():
                if found is not None:
                    self.store.write_artifact(name, found.to_bytes())
                elif anew:  # one of other chunks must not stay
                    self.store.delete_artifact(name)
        return True

    def _read(self, name: str, generation: str) -> HeldCorrection:
        try:
            content = self.store.read_artifact(name)
            if content is None:
                return HeldCorrection(None, (), generation)
            found = KVCorrection.from_bytes(content, self.decoder.device)
            found.require_fit(self.decoder.rotations)
        except (EntryDamagedError, ValueError) as error:
            return HeldCorrection(None, (f"the KV correction cannot be used: {error}",), generation)
        return HeldCorrection(found, (), generation)
