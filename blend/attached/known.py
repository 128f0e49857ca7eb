"""Known text in prompts of token ids: how it is found, blended, and learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blend.attached.beginning import Beginning
from blend.attached.seen import SeenTexts
from blend.config import BlendConfig
from blend.layout import PlaceOrigin, PromptLayout, Span, Tokens
from blend.prefill.blender import Blend, Blender
from blend.prefill.prefill import LEAST_RATIO_UNCORRECTED
from blend.rag import Rag
from blend.serve.prompts.reuse import PromptSearch
from blend.serve.prompts.tenant import TenantState
from blend.serve.prompts.trusted import trusted_chunks
from blend.serve.request import RequestOrigin
from blend.serve.token_index import LEAST_PIECE
from blend.stopwatch import Progress, no_progress
from blend.types import CacheKey

MOST_USERS = 256  # whose texts that came once are remembered


class KnownTexts:
    """The text that a store's corpora hold and that prompts brought, each end user's apart. One thread at a time may use it.

    Args:
        rag: the store's corpus without a name; it brings the decoder.
        config: how rows are chosen. With `reproducible`, nothing is learned.
        learn_budget: bytes of caches of text that prompts brought; 0 learns nothing.

    Attributes:
        blender: blends its prompts.

    """

    def __init__(self, rag: Rag, config: BlendConfig, learn_budget: int) -> None:
        self.blender = Blender(rag.decoder, rag.store, config, uncorrected_ratio=LEAST_RATIO_UNCORRECTED)
        self._tenant = TenantState(rag, learn_budget)
        self._seen = dict[str, SeenTexts]()  # of each end user, the latest last
        self._beginning: Beginning | None = None

    @property
    def learns(self) -> bool:
        """Whether text of prompts is learned."""
        return self._tenant.learned is not None and not self.blender.config.reproducible

    def read_corpora(self) -> None:
        """Tokenise the corpora's chunks now, which the first prompt would wait for."""
        self._tenant.read_corpora()

    # Prompts

    def layout(self, ids: Tokens, user: str = "") -> PromptLayout:
        """A prompt with all known text as its places, and new text that may be learned. user: whose learned text it may use."""
        tenant = self._tenant
        texts = tenant.texts(tenant.view(""), user, anywhere=True)
        return PromptSearch(tenant.chat.continued(ids), (), texts).reuse().layout

    def prefill(self, layout: PromptLayout) -> Blend:
        """Blend a prompt behind the rows with which the last one began, too. Raises `StoreError` and `PromptError`."""
        model = self.blender.decoder.fingerprint
        beginning = None if self._beginning is None else self._beginning.known(model, layout)
        blend = self.blender.prefill(layout, room=0, known=beginning)
        self._beginning = Beginning.of(blend)
        return blend

    # Learning

    def learn(self, texts: Iterable[str], progress: Progress = no_progress) -> int:
        """Learn texts, and fit the KV correction that the store lacks.

        Returns how many passages are new. Raises `StoreError`.
        """
        decoder = self.blender.decoder
        cutter = self._tenant.texts(self._tenant.view(""), "", anywhere=True).cutter
        pieces = dict[Tokens, None]()
        for text in texts:
            ids = tuple(decoder.tokenizer.encode(text, add_special_tokens=False))
            spans = _long_enough(cutter.pieces(ids))
            pieces |= {ids[span.start : span.stop]: None for span in spans}
        count = self.compute(list(pieces), progress=progress)
        self.fit(progress)
        return count

    def fit(self, progress: Progress = no_progress) -> None:
        """Fit the KV correction that the store lacks, if one is to be used. Raises `StoreError`.

        `progress` may raise; a store in a folder then goes on where this ended.
        """
        if self.blender.config.correction:
            chunks = trusted_chunks(self._tenant.rag())
            self.blender.calibrate(self._prefix, chunks, provisional=True, progress=progress)

    def compute(self, texts: Sequence[Tokens], user: str = "", progress: Progress = no_progress) -> int:
        """Learn texts of an end user; returns how many of them were new. Raises `StoreError`."""
        if self._tenant.learned is None:
            return 0
        library = self.blender.library(self._prefix)
        admitted = self._tenant.learn(library, texts, RequestOrigin(user))
        library = self.blender.library(self._prefix)  # a surrogate context may have been chosen
        missing = library.missing(list(admitted))
        library.compute(missing, progress)
        return len({variant.chunk for variant in missing})

    def compute_recurring(self, prompts: Sequence[Tokens], user: str = "") -> int:
        """Learn what these prompts hold of the text that came once; returns how many were new. Raises `StoreError`."""
        texts = self._seen.get(user)
        return self.compute(list(texts.recurring(prompts)), user) if texts is not None else 0

    def missing(self, layout: PromptLayout) -> list[CacheKey]:
        """The caches of known text that a prompt lacks: of these weights, or because they left. Raises `StoreError`."""
        if self.blender.config.reproducible:
            return []
        library = self.blender.library(layout.kept_behind)
        in_memory = library.tables()
        return library.missing_of([key for key in library.wanted(layout) if key.chunk not in in_memory[key.kind]])

    def compute_missing(self, layout: PromptLayout, progress: Progress = no_progress) -> int:
        """Compute the caches that a prompt lacks; returns of how many texts. Raises `StoreError`."""
        missing = self.missing(layout)
        self.blender.library(layout.kept_behind).compute(missing, progress)
        return len({variant.chunk for variant in missing})

    def note_new(self, layout: PromptLayout, user: str = "") -> list[Tokens]:
        """Remember the new text of an end user's prompt, which is learned when it comes again; returns it."""
        if not self.learns:
            return []
        pieces = [place.tokens for place in layout.places if place.origin is PlaceOrigin.NEW]
        texts = self._seen.pop(user, None) or SeenTexts()
        self._seen[user] = texts
        texts.add(pieces)
        for oldest in list(self._seen)[:-MOST_USERS]:
            del self._seen[oldest]
        return pieces

    @property
    def _prefix(self) -> Tokens:
        """What all caches are computed behind."""
        return self._tenant.template.prefix


def _long_enough(pieces: Iterable[Span]) -> list[Span]:
    """Pieces of a text, the short ones joined to a neighbour; none if the whole text is too short to learn."""
    joined = list[Span]()
    for piece in pieces:
        if joined and min(joined[-1].length, piece.length) < LEAST_PIECE:
            joined[-1] = Span(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return [piece for piece in joined if piece.length >= LEAST_PIECE]
