"""The state of one tenant: its corpora, the texts it may paste, and what the server learns from its questions."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from blend.corpora import corpora, in_words, index_dir, named_folders
from blend.corpus import TitledText
from blend.errors import ConfigError, ContextLengthError, PromptError, StoreError
from blend.limits import check_corpus_name
from blend.prompt import TextTokenizer
from blend.serve.failures import LOG, STORE_UNREACHABLE
from blend.serve.learned import LearnedCaches, LearnedTexts
from blend.serve.passages import Cutter, Reuse, Texts, TokenIndex, reuse
from blend.serve.text import ChatTemplate
from blend.serve.types import Cited, GivenDocument, SourceKind
from blend.serve.uploads import INCOMING, part_of, spellings
from blend.types import Place
from blend_retrieval import Chunk, RetrievalError, Retriever
from blend_retrieval.document import clean, clean_title
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.rag import Rag
    from blend.store import ChunkStore
    from blend.types import CacheKey, ChunkCache, PromptLayout, Tokens
    from blend_retrieval import ChunkIndex

TENANTS = "tenants"
_BLANK_LINES = re.compile(r"\n\s*\n\s*\n")  # more than one


def tenant_root(root: Path, tenant: str) -> Path:
    """The store of a tenant within the server's; that of "" is the server's own."""
    check_corpus_name(tenant)
    return root / TENANTS / tenant if tenant else root


def kept_corpora(root: Path) -> set[tuple[str, str]]:
    """Tenant and name of every corpus that exists or has uploads."""
    roots = {tenant: tenant_root(root, tenant) for tenant in ("", *named_folders(root / TENANTS))}
    return {(tenant, name) for tenant, own in roots.items() for name in {*corpora(own), *begun_corpora(own)}}


def begun_corpora(root: Path) -> set[str]:
    """Names of the corpora in a tenant's store that have uploads, indexed or not."""
    names = ("", *named_folders(root / "corpora"))
    return {name for name in names if (index_dir(root, name).parent / INCOMING).is_dir()}


class StoreWatch:
    """Whether a store is reachable; logs every change once. Thread-safe.

    Args:
        store: opens the store.
        parent: watches the store that contains this one. While that is unreachable, this one is not opened, because it
            would be created anew.

    """

    def __init__(self, store: Callable[[], ChunkStore], parent: StoreWatch | None = None) -> None:
        self._store, self._parent = store, parent
        self._lock, self._lost = threading.Lock(), False

    def reachable(self) -> bool:
        """Whether the store can be read now."""
        try:
            self.require()
        except StoreError:
            return False
        return True

    def require(self) -> None:
        """Raise `StoreError` if the store cannot be read now."""
        if self._parent is not None:
            self._parent.require()
        try:
            _ = self._store().generation
        except StoreError as error:
            self.lost(str(error))
            raise
        if self._changed(lost=False):
            LOG.info("store_back")

    def lost(self, why: str) -> None:
        """Note that a read failed just now."""
        if self._changed(lost=True):
            LOG.warning(STORE_UNREACHABLE, extra={"why": why})

    def _changed(self, *, lost: bool) -> bool:
        with self._lock:
            before, self._lost = self._lost, lost
        return before != lost


class TenantState:
    """One tenant's corpora and texts. Thread-safe.

    Args:
        rag: its corpus without a name.
        learn_budget: bytes of caches of texts that questions bring; 0 learns nothing.
        parent: watches the server's store. While the tenant's own is unreachable, corpora are as they were last read.
        learned_by: the list of another process that learns in place of this one.

    """

    def __init__(
        self, rag: Rag, learn_budget: int, parent: StoreWatch | None = None, *, learned_by: Path | None = None
    ) -> None:
        self._rags, self._lock = {"": rag}, threading.RLock()
        self.watch = StoreWatch(lambda: rag.store, parent)
        self._names: tuple[str, ...] = ()
        self._indexes: dict[str, ChunkIndex] = {}
        self._leaving: dict[str, Callable[[], frozenset[str]]] = {}
        self.chat = ChatTemplate(rag.decoder.tokenizer, rag.template.prefix)
        control = TextTokenizer(rag.decoder.tokenizer).control
        self._cutter = Cutter(rag.decoder.tokenizer, control, rag.decoder.operator_rows)
        self._known: dict[str, tuple[object, TokenIndex[Chunk]]] = {}
        self.learned = LearnedCaches(rag.root / "learned.sqlite", learn_budget) if learn_budget else None
        self._learned_by = LearnedTexts(learned_by) if learned_by is not None else self.learned
        self._unlearned = ""  # why nothing was learned last

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of its corpora."""
        with suppress(OSError):
            names = corpora(self._rags[""].root)
            if names == self._names or self.watch.reachable():
                self._names = names
        return self._names

    def rag(self, corpus: str = "") -> Rag:
        """The corpus of this name, which need not exist yet.

        Raises `ConfigError` for an invalid name, `StoreError` for a new one while the store is unreachable.
        """
        with self._lock:
            if corpus not in self._rags:
                check_corpus_name(corpus)
                self.watch.require()
                self._rags[corpus] = self._rags[""].sibling(corpus)
            return self._rags[corpus]

    def hide(self, corpus: str, leaving: Callable[[], frozenset[str]]) -> None:
        """Never answer from the uploads of these ids, even while the index still holds them."""
        self._leaving[corpus] = leaving

    def retrieved(self, corpus: str, asked: Sequence[str], top_k: int) -> list[Cited]:
        """The chunks that are most similar to the last question and, with less weight, to those before it.

        Raises `RetrievalError` without a corpus, `StoreError` while that is unknown.
        """
        hidden, rag, index = self._hidden(corpus), self.rag(corpus), self._index(corpus)
        skip = (lambda document: any(part_of(document, one) for one in hidden)) if hidden else None
        retriever = Retriever(index, rag.embedder, rag.corpus_config.min_score, rag.reranker)
        found = retriever.search(asked[-1], top_k, skip, before=asked[:-1])
        if not found and not _without(index, hidden):
            raise PromptError("the corpus holds no chunks; add documents first")
        return [_cited_chunk(rag, hit.chunk, "retrieved", hit.score) for hit in found]

    def given(
        self, corpus: str, documents: Sequence[GivenDocument], require: Callable[[], None] = lambda: None
    ) -> list[Cited]:
        """The documents that a question brings, each in one piece, and the chunks of those that it names.

        require: called between steps; may raise to give up. Raises `PromptError` for unknown ids, `ContextLengthError` for more
        tokens than the model reads.
        """
        rag, tokens = self.rag(corpus), 0
        found: list[Cited] = []
        for number, document in enumerate(documents):
            require()
            if document.text.strip():
                text = TitledText(clean_title(document.title), _BLANK_LINES.sub("\n\n", clean(document.text)))
                name = document.id or f"document {number + 1}"
                passage = Place(rag.template.chunk_ids(text))
                mine = [Cited(passage, "document", "", name, text.title, text.text, brought=True)]
            else:
                chunks = self._named(corpus, document.id) if document.id else []
                mine = [_cited_chunk(rag, chunk, "document", None) for chunk in chunks]
            found.extend(mine)
            tokens += sum(len(one.place.tokens) for one in mine)
            require_length(tokens, rag.decoder.context_length)
        return found

    def reuse(self, corpus: str | None, layout: PromptLayout, cited: Sequence[Cited]) -> Reuse:
        """A prompt with all reusable text as its places.

        cited: sources of the places that it has. corpus: None picks the one of which the prompt holds most.
        """
        names = (corpus,) if corpus is not None else dict.fromkeys(("", *self.corpora))
        learned = self._learned_by.index if self._learned_by is not None else None
        corpora = {name: self._texts(name) for name in names}
        decoder = self.rag().decoder
        texts = Texts(corpora, learned, self._cutter, self.learned is not None, whole=bool(decoder.recurrent))
        found, decode = reuse(layout, cited, texts), decoder.tokenizer.decode
        named = (
            one if one.text else one._replace(text=decode(one.place.tokens, skip_special_tokens=True))
            for one in found.cited
        )
        return found._replace(cited=tuple(named))

    def read_corpora(self) -> None:
        """Tokenise the corpora's chunks now, which the first prompt would wait for: about a second for a million tokens."""
        for name in dict.fromkeys(("", *self.corpora)):
            self._texts(name)

    def keep(
        self, library: ChunkLibrary, brought: Mapping[Tokens, ChunkCache | None], begun: float
    ) -> Sequence[CacheKey]:
        """Learn the texts that a prompt brought; see `LearnedCaches.keep`. An outage is logged, once."""
        assert self.learned is not None
        try:
            alone = self.learned.keep(library, brought, begun)
        except StoreError as error:
            if str(error) != self._unlearned:
                LOG.warning("learning_failed", extra={"why": str(error)})
            self._unlearned = str(error)
            return ()
        self._unlearned = ""
        return alone

    def forget(self, texts: Collection[Tokens]) -> None:
        """Forget learned text of removed documents, which had these chunks. Raises `StoreError`."""
        if self.learned is not None:
            self.learned.forget(self.rag().store, texts)

    def _hidden(self, corpus: str) -> frozenset[str]:
        """Uploads not to answer from. Ask before reading the index: later removals are then out of the index."""
        return self._leaving.get(corpus, frozenset)()

    def _index(self, corpus: str) -> ChunkIndex:
        """The index as it is now, or as it was last read during an outage. Raises what prevented reading it."""
        try:
            self._indexes[corpus] = self.rag(corpus).index
        except (RetrievalError, ConfigError, OSError) as error:
            if self.watch.reachable():
                if isinstance(error, ConfigError):  # its message names the store's place
                    raise IndexMissingError(f"there is no corpus {in_words(corpus)}") from None
                raise
            if corpus not in self._indexes:
                self.watch.require()
                raise
        return self._indexes[corpus]

    def _texts(self, corpus: str) -> TokenIndex[Chunk]:
        """The corpus's chunks as they are now; none without a corpus."""
        index, hidden = None, self._hidden(corpus)
        with suppress(RetrievalError, ValueError, StoreError):
            index = self._index(corpus)
        with self._lock:
            seen, known = self._known.get(corpus) or (None, TokenIndex())
            if seen != (index, hidden):
                held, now, encode = set(known.names), set(_without(index, hidden)), self.rag().template.chunk_ids
                known.update(held - now, {chunk: encode(chunk) for chunk in now - held})
                self._known[corpus] = (index, hidden), known
            return known

    def _named(self, corpus: str, document: str) -> list[Chunk]:
        hidden = self._hidden(corpus)
        with suppress(RetrievalError):
            held = _without(self._index(corpus), hidden)
            for name in spellings(document):
                if chunks := [chunk for chunk in held if part_of(chunk.document_id, name)]:
                    return chunks
        self.watch.require()
        raise PromptError(f"no document of the corpus has the id {document!r}; give its text, or an id that is there")


def require_length(tokens: int, longest: int | None) -> None:
    """Raise `ContextLengthError` if a part of a prompt already has more tokens than the model reads."""
    if longest is not None and tokens > longest:
        message = f"the prompt has more than {longest:,} tokens, all that the model reads; shorten it"
        raise ContextLengthError(message, longest)


def _without(index: ChunkIndex | None, hidden: frozenset[str]) -> Sequence[Chunk]:
    """The chunks of an index except those of hidden uploads."""
    chunks = index.chunks if index is not None else ()
    if not hidden:
        return chunks
    return [one for one in chunks if not any(part_of(one.document_id, upload) for upload in hidden)]


def _cited_chunk(rag: Rag, chunk: Chunk, kind: SourceKind, score: float | None) -> Cited:
    ids = rag.template.chunk_ids(chunk)
    return Cited(Place(ids), kind, chunk.id, chunk.document_id, chunk.title, chunk.text, score)
