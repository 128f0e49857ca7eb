"""The state of one tenant: its corpora, the texts it may paste, and what the server learns from its questions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from blend.chunks.library import Tokens
from blend.corpora import corpora, in_words, index_dir
from blend.corpus import choose_surrogate, divided
from blend.errors import ConfigError, ContextLengthError, PromptError, StoreError
from blend.limits import check_corpus_name, is_corpus_name
from blend.serve.background import Compute, ignore
from blend.serve.corpus_caches import WatchedTemplate, current_index
from blend.serve.failures import LOG, STORE_UNREACHABLE
from blend.serve.learned import SHARE, LearnedCaches, RecentTexts
from blend.serve.passages.known import KnownTexts
from blend.serve.passages.rendered import Renderer
from blend.serve.passages.segments import Segment, cut, with_text_around
from blend.serve.text import ChatTemplate, Turn
from blend.serve.types import Cited, GivenDocument, Message, Passage, SourceKind
from blend.serve.uploads import INCOMING, part_of, spellings
from blend.types import Part
from blend_retrieval import Chunk, RetrievalError, Retriever
from blend_retrieval.document import Document
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend.store import ChunkStore
    from blend_retrieval import ChunkIndex

TENANTS = "tenants"
Calibrate = Callable[["Rag", Sequence[Tokens]], bool]
"""Measures the missing KV corrections on these chunks when no request waits; returns whether it finished."""


def tenant_root(root: Path, tenant: str) -> Path:
    """The store of a tenant within the server's; that of "" is the server's own."""
    check_corpus_name(tenant)
    return root / TENANTS / tenant if tenant else root


def kept_corpora(root: Path) -> set[tuple[str, str]]:
    """Tenant and name of every corpus that exists or has uploads."""
    roots = {tenant: tenant_root(root, tenant) for tenant in ("", *_named_folders(root / TENANTS))}
    return {(tenant, name) for tenant, own in roots.items() for name in {*corpora(own), *begun_corpora(own)}}


def begun_corpora(root: Path) -> set[str]:
    """Names of the corpora in a tenant's store that have uploads, indexed or not."""
    names = ("", *_named_folders(root / "corpora"))
    return {name for name in names if (index_dir(root, name).parent / INCOMING).is_dir()}


def _named_folders(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if is_corpus_name(path.name)]
    except OSError:
        return []


class StoreWatch:
    """Whether a store is reachable; logs every change once. Thread-safe.

    store: opens it. parent: watches the store that contains this one. While that is unreachable nothing is opened: it would be
    created anew.
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

    rag: its corpus without a name.
    learn_budget: bytes of caches of texts that questions bring; 0 learns nothing.
    parent: watches the server's store. While the tenant's own is unreachable, corpora are as they were last read.
    """

    def __init__(self, rag: Rag, learn_budget: int, parent: StoreWatch | None = None) -> None:
        self._rags, self._lock = {"": rag}, threading.RLock()
        self.watch = StoreWatch(lambda: rag.store, parent)
        self._names: tuple[str, ...] = ()
        self._indexes: dict[str, ChunkIndex] = {}
        self._leaving: dict[str, Callable[[], frozenset[str]]] = {}
        self.chat = ChatTemplate(rag.decoder.tokenizer, rag.template.prefix)
        self._renderer = Renderer(rag.template, rag.decoder.tokenizer)
        self._known: dict[str, tuple[object, KnownTexts]] = {}
        self.learned = LearnedCaches(rag.root / "learned.json", learn_budget) if learn_budget else None
        self._unlearned = ""  # why nothing was learned last
        self.recent = RecentTexts(SHARE * rag.corpus_config.surrogate_tokens)

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
        found = Retriever(index, rag.embedder, rag.corpus_config.min_score).search(
            asked[-1], top_k, skip, before=asked[:-1]
        )
        if not found and not rag.corpus_config.min_score:
            raise PromptError("the corpus holds no chunks; add documents first")
        return [_cited_chunk(rag, hit.chunk, "retrieved", hit.score) for hit in found]

    def given(
        self, corpus: str, documents: Sequence[GivenDocument], require: Callable[[], None] = lambda: None
    ) -> list[Cited]:
        """The documents that a question brings or names, as chunks.

        require: called between steps; may raise to give up. Raises `PromptError` for unknown ids, `ContextLengthError` for more
        tokens than the model reads.
        """
        rag, tokens = self.rag(corpus), 0
        template = WatchedTemplate(rag.template, lambda *_: require())
        found: list[Cited] = []
        for number, document in enumerate(documents):
            chunks: Iterable[Chunk] = ()
            if brought := bool(document.text.strip()):
                name = document.id or f"document {number + 1}"
                new = Document(name, document.title, document.text, "")
                chunks = divided([new], template, rag.corpus_config)
            elif document.id:
                chunks = self._named(corpus, document.id)
            for chunk in chunks:
                require()
                found.append(_cited_chunk(rag, chunk, "document", None)._replace(brought=brought))
                tokens += len(found[-1].passage.ids)
                require_length(tokens, rag.decoder.context_length)
        return found

    def written(
        self, corpus: str | None, messages: Sequence[Message], *, bare: bool = False
    ) -> tuple[str, list[Turn], list[Cited]]:
        """Messages split into ordinary text and passages: pasted chunks of one corpus, and long texts to learn.

        Returns the corpus of these chunks, the messages as they stand in a prompt, and their passages in order.
        corpus: None picks the one that knows most of them. bare: no chat template will surround them.
        """
        names = (corpus,) if corpus is not None else dict.fromkeys(("", *self.corpora))
        found = cut(messages, {name: self._texts(name) for name in names}, learning=self.learned is not None)
        turns, cited = list[Turn](), list[Cited]()
        for message, parts in zip(messages, found.messages, strict=True):
            if bare:
                parts = with_text_around(parts, opened=bool(self.chat.opening))
            own = [_cited_segment(part) if part.ids else part.text for part in parts]
            turns.append(Turn(message.role, [one.passage if isinstance(one, Cited) else one for one in own]))
            cited.extend(one for one in own if isinstance(one, Cited))
        return found.corpus, turns, cited

    def learn(self, corpus: str, cited: Sequence[Cited]) -> bool:
        """Whether the caches of these passages may be stored; evicts older ones for them.

        Always true for chunks of the tenant's corpora, never for passages that exceed the budget together.
        """
        new = [one for one in cited if one.brought]
        if not new:
            return True
        if self.learned is None:
            return False
        chunks = [one.passage.part.whole if one.passage.part else one.passage.ids for one in new]
        rag = self.rag(corpus)
        try:
            library = rag.blender.library(rag.template.prefix)
            fits = self.learned.admitted(library, chunks).issuperset(chunks)
        except StoreError as error:
            if str(error) != self._unlearned:
                LOG.warning("learning_failed", extra={"why": str(error)})
            self._unlearned = str(error)
            return False
        self._unlearned = ""
        if not corpus:
            self.recent.add(chunks)
        return fits

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

    def _texts(self, corpus: str) -> KnownTexts:
        """The texts of the corpus's chunks as they are now; none without a corpus."""
        index, hidden = None, self._hidden(corpus)
        with suppress(RetrievalError, ValueError, StoreError):
            index = self._index(corpus)
        with self._lock:
            seen, known = self._known.get(corpus) or (None, KnownTexts(self._renderer))
            if seen != (index, hidden):
                known.update(_without(index, hidden))
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
    return Cited(Passage(ids), kind, chunk.id, chunk.document_id, chunk.title, chunk.text, score)


def _cited_segment(segment: Segment) -> Cited:
    part = None if segment.whole in ((), segment.ids) else Part(segment.whole, segment.first)
    chunk, learned = segment.chunk, segment.kind == "learned"
    passage, kind = Passage(segment.ids, part), cast(SourceKind, segment.kind)
    named = (chunk.id, chunk.document_id, chunk.title) if chunk else ("", "", "")
    return Cited(passage, kind, *named, segment.text, brought=learned)


class Learning:
    """Fits learned texts in the background: chooses a tenant's surrogate context and measures its KV corrections, once.

    Without documents nothing else does. A tenant's texts alone are used, and the results lie in its own store. Where it has
    documents, theirs are used. compute: of the engine. calibrate: waits itself until no request does.
    """

    def __init__(self, compute: Compute, calibrate: Calibrate) -> None:
        self._compute, self._calibrate = compute, calibrate
        self._lock, self._due, self._closed = threading.Lock(), set[TenantState](), False
        self._pool = ThreadPoolExecutor(1, "kvblend-learning")

    def notice(self, tenant: TenantState) -> None:
        """A question brought this tenant texts; returns at once."""
        with self._lock:
            if self._closed or tenant in self._due or not is_due(tenant):
                return
            self._due.add(tenant)
            self._pool.submit(self._run, tenant)

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to decide or measure."""
        return not self._due

    def close(self) -> None:
        """Stop, after the engine; the next process does what is left."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(cancel_futures=True)

    def _run(self, tenant: TenantState) -> None:
        try:
            index = current_index(tenant.rag())
            if is_due(tenant) and not (index and index.chunks):
                self._decide(tenant)
        except Exception as error:  # an outage, or an engine that closes: the next question starts it again
            has_no_text = isinstance(error, StoreError | RetrievalError)
            LOG.warning("learning_failed", extra={"why": str(error) if has_no_text else type(error).__name__})
        finally:
            with self._lock:
                self._due.discard(tenant)

    def _decide(self, tenant: TenantState) -> None:
        """Choose the surrogate context, compute the caches that need it, and calibrate on them."""
        rag, learned = tenant.rag(), tenant.learned
        assert learned is not None
        library = rag.blender.library(rag.template.prefix)
        library = choose_surrogate(library, rag.template, rag.corpus_config, tenant.recent.latest())
        chunks = tenant.recent.latest()  # questions since then computed caches without a surrogate context
        admitted = learned.admitted(library, chunks[::-1])  # the latest stay
        chunks = [chunk for chunk in chunks if chunk in admitted]
        self._compute(library, library.missing(chunks), ignore).ended.wait()
        if self._calibrate(rag, chunks):
            learned.decided = True
            learned.save()


def is_due(tenant: TenantState) -> bool:
    """Whether enough was learned to choose a surrogate context, and none was chosen yet."""
    learned, tokens = tenant.learned, tenant.rag().corpus_config.surrogate_tokens
    return learned is not None and bool(tokens) and not learned.decided and tenant.recent.tokens >= SHARE * tokens
