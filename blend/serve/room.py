"""What one tenant has: a store of its own with its corpora, and what is known and learned of its texts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blend.corpora import corpora, in_words
from blend.corpus import TitledText
from blend.errors import ConfigError, ContextLengthError, PromptError, StoreError
from blend.limits import check_corpus_name, is_corpus_name
from blend.prompt import render_chunk
from blend.serve.chat import ChatTemplate, Passage, Turn
from blend.serve.heard import AGAIN, SHARE, Heard
from blend.serve.outage import StoreWatch
from blend.serve.passages.known import KnownTexts
from blend.serve.passages.learned import Learned
from blend.serve.passages.messages import cut, with_text_around
from blend.serve.passages.rendered import Renderer
from blend.serve.passages.segments import Segment
from blend.serve.removed import removed_from
from blend.serve.spool import INCOMING
from blend.serve.types import GivenDocument, Message, SourceKind
from blend.serve.uploads import part_of, spellings
from blend.types import Part
from blend_retrieval import Chunk, RetrievalError, Retriever, chunk_documents
from blend_retrieval.document import Document
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.chunks.library import Tokens
    from blend.rag import Rag
    from blend_retrieval import ChunkIndex

TENANTS = "tenants"


class Cited(NamedTuple):
    """A passage of a prompt, and what its reader is told of it. brought: whether the question brought its text."""

    passage: Passage
    kind: SourceKind
    id: str
    document: str
    title: str
    text: str
    score: float | None = None
    brought: bool = False


class WrittenMessages(NamedTuple):
    """Messages as they are to stand in a prompt, and their passages in order. corpus: whose chunks are among these."""

    corpus: str
    turns: list[Turn]
    cited: list[Cited]


def room_root(root: Path, tenant: str) -> Path:
    """Where a tenant's store lies in the server's; nobody's is the server's own."""
    check_corpus_name(tenant)
    return root / TENANTS / tenant if tenant else root


def kept_corpora(root: Path) -> set[tuple[str, str]]:
    """Tenant and name of every corpus that is there, or that documents were taken in for."""
    found = set[tuple[str, str]]()
    tenants = [path.name for path in _folders(root / TENANTS) if is_corpus_name(path.name)]
    for tenant in ("", *tenants):
        mine = room_root(root, tenant)
        found |= {(tenant, name) for name in (*corpora(mine), *begun_corpora(mine))}
    return found


def begun_corpora(mine: Path) -> set[str]:
    """Names of the corpora in a tenant's store that documents were taken in for, indexed or not."""
    folders = [mine, *(path for path in _folders(mine / "corpora") if is_corpus_name(path.name))]
    return {"" if path == mine else path.name for path in folders if (path / INCOMING).is_dir()}


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:  # not there, or not to be read
        return []


class Room:
    """One tenant's corpora and texts. Threads may share it.

    rag: its corpus without a name. learn_budget: bytes of caches of texts that came with questions; 0 learns nothing.
    above: watches the store that this one lies in. While its own is out of reach, corpora are as they were last read.
    """

    def __init__(self, rag: Rag, learn_budget: int, above: StoreWatch | None = None) -> None:
        self._rags, self._lock = {"": rag}, threading.RLock()
        self.watch = StoreWatch(lambda: rag.store, above)
        self._names: tuple[str, ...] = ()
        self._indexes: dict[str, ChunkIndex] = {}
        self._leaving: dict[str, Callable[[], frozenset[str]]] = {}
        self.chat = ChatTemplate(rag.decoder.tokenizer, rag.template.prefix)
        self._renderer = Renderer(rag.template, rag.decoder.tokenizer)
        self._known: dict[str, tuple[object, KnownTexts]] = {}
        self.learned = Learned(rag.root / "learned.json", learn_budget) if learn_budget else None
        self.heard = Heard(SHARE * AGAIN * rag.corpus_config.surrogate_tokens)

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of its corpora."""
        with suppress(OSError):
            names = corpora(self._rags[""].root)
            if names == self._names or self.watch.reachable():
                self._names = names
        return self._names

    def rag(self, corpus: str = "") -> Rag:
        """A corpus of this name, there or not yet.

        Raises `ConfigError` for what cannot name one, `StoreError` for one that is new while the store is out of reach.
        """
        with self._lock:
            if corpus not in self._rags:
                check_corpus_name(corpus)
                self.watch.require()
                self._rags[corpus] = self._rags[""].sibling(corpus)
            return self._rags[corpus]

    def hide(self, corpus: str, leaving: Callable[[], frozenset[str]]) -> None:
        """Answer from none of the uploads of these ids, even while the index of the corpus holds them."""
        self._leaving[corpus] = leaving

    def _gone(self, corpus: str) -> frozenset[str]:
        """Uploads that are not to be answered from. To be asked before the index: what leaves it meanwhile is among them."""
        return self._leaving.get(corpus, frozenset)()

    def retrieved(self, corpus: str, asked: Sequence[str], top_k: int) -> list[Cited]:
        """The chunks of a corpus that are most like the last question, and in part those before it.

        Raises `RetrievalError` where there is no corpus, `StoreError` where that is not known.
        """
        gone, rag, index = self._gone(corpus), self.rag(corpus), self._index(corpus)
        hidden = (lambda document: any(part_of(document, one) for one in gone)) if gone else None
        found = Retriever(index, rag.embedder, rag.corpus_config.min_score).search(
            asked[-1], top_k, hidden, before=asked[:-1]
        )
        if not found and not rag.corpus_config.min_score:
            raise PromptError("the corpus holds no chunks; add documents first")
        return [self._of_chunk(rag, hit.chunk, "retrieved", hit.score) for hit in found]

    def given(
        self, corpus: str, documents: Sequence[GivenDocument], require: Callable[[], None] = lambda: None
    ) -> list[Cited]:
        """Documents that came with a question, or that it names, as chunks.

        require: called between pieces of the work. Raises `PromptError` for ids that nothing has, and for more than the model
        reads.
        """
        rag, tokens = self.rag(corpus), 0
        found: list[Cited] = []

        def encode(text: str) -> list[int]:
            require()
            return rag.template.encode(text)

        for number, document in enumerate(documents):
            chunks: Iterable[Chunk] = ()
            if brought := bool(document.text.strip()):
                name = document.id or f"document {number + 1}"
                new = Document(name, document.title, document.text, "")
                chunks = chunk_documents([new], encode, rag.corpus_config.chunk_tokens, _rendered)
            elif document.id:
                chunks = self._named(corpus, document.id)
            for chunk in chunks:
                require()
                found.append(self._of_chunk(rag, chunk, "document", None)._replace(brought=brought))
                tokens += len(found[-1].passage.ids)
                require_length(tokens, rag.decoder.context_length)
        return found

    def written(self, corpus: str | None, messages: Sequence[Message], *, bare: bool = False) -> WrittenMessages:
        """Messages as ordinary text and passages: chunks of one corpus that were pasted, and long texts to be learned.

        corpus: None looks for the one that knows most of them. bare: no chat template will stand around them.
        """
        names = (corpus,) if corpus is not None else dict.fromkeys(("", *self.corpora))
        found = cut(messages, {name: self._texts(name) for name in names}, learning=self.learned is not None)
        turns, cited = list[Turn](), list[Cited]()
        for message, parts in zip(messages, found.messages, strict=True):
            if bare:
                parts = with_text_around(parts, opened=bool(self.chat.opening))
            mine = [_cited(part) for part in parts if part.ids]
            passages = iter(mine)
            content = [next(passages).passage if part.ids else part.text for part in parts]
            turns.append(Turn(message.role, content))
            cited.extend(mine)
        return WrittenMessages(found.corpus, turns, cited)

    def learn(self, corpus: str, cited: Sequence[Cited]) -> bool:
        """Whether these passages may be stored; those that go for them are removed from the store.

        Chunks of the tenant's corpora always may, and passages that need more than the whole budget together never.
        """
        new = [one for one in cited if one.brought]
        if not new:
            return True
        if self.learned is None:
            return False
        with suppress(StoreError):  # gone since it was looked at
            return self._note(corpus, new, self.learned)
        return False

    def _note(self, corpus: str, new: Sequence[Cited], learned: Learned) -> bool:
        chunks = [one.passage.part.whole if one.passage.part else one.passage.ids for one in new]
        fits = self.enter(corpus, chunks, learned)
        if not corpus:
            self.heard.add(chunks)
        return fits

    @property
    def token_bytes(self) -> int:
        """Of a cache, as a codec of 16 bits a value keeps it."""
        return sum(layer.width for layer in self._rags[""].decoder.rotations) * 2

    def enter(self, corpus: str, chunks: Sequence[Tokens], learned: Learned) -> bool:
        """Note the caches of these chunks as used, and remove what goes for them; whether none of their own goes.

        Raises `StoreError`.
        """
        rag = self.rag(corpus)
        library = rag.blender.library(rag.template.prefix)
        keys = {library.key(one): len(one.chunk) * self.token_bytes for one in library.variants(chunks)}
        removed_from(rag.store).allow(keys)
        known = all(key in learned for key in keys)
        gone = learned.seen(keys)
        with suppress(StoreError):  # the store is down or read-only: what is too much goes another time
            used = self._in_use() if gone else set()
            for key in gone:
                if key not in used:
                    rag.store.delete(key)
            if gone or not known:  # the order alone is not worth a file for every question
                learned.save()
        return not keys.keys() & set(gone)

    def _in_use(self) -> set[Any]:
        """Keys of everything that the corpora hold."""
        keys: set[Any] = set()
        for name in self.corpora:
            rag = self.rag(name)
            library = rag.blender.library(rag.template.prefix)
            keys |= library.keys([rag.template.chunk_ids(chunk) for chunk in rag.index.chunks])
        return keys

    def _index(self, corpus: str) -> ChunkIndex:
        """The chunks of a corpus as they are now, or were when they could last be read. Raises what kept them from it."""
        try:
            found = self.rag(corpus).index
        except (RetrievalError, ConfigError, OSError) as error:
            if self.watch.reachable():
                if isinstance(error, ConfigError):  # the store has others only, and the message says where it lies
                    raise IndexMissingError(f"there is no corpus {in_words(corpus)}") from None
                raise
            held = self._indexes.get(corpus)
            if held is None:
                self.watch.require()
                raise
            return held
        self._indexes[corpus] = found
        return found

    def _texts(self, corpus: str) -> KnownTexts:
        """The texts of a corpus's chunks as they are now."""
        index, gone = None, self._gone(corpus)
        with suppress(RetrievalError, ValueError, StoreError):  # without a corpus no text is known
            index = self._index(corpus)
        with self._lock:
            held = self._known.get(corpus)
            if held is None:
                held = self._known[corpus] = (None, KnownTexts(self._renderer))
            if held[0] != (index, gone):
                held[1].update(_without(index, gone))
                self._known[corpus] = ((index, gone), held[1])
            return held[1]

    def _named(self, corpus: str, document: str) -> list[Chunk]:
        gone = self._gone(corpus)
        with suppress(RetrievalError):
            held = _without(self._index(corpus), gone)
            for name in spellings(document):
                if chunks := [chunk for chunk in held if part_of(chunk.document_id, name)]:
                    return chunks
        self.watch.require()
        raise PromptError(f"no document of the corpus has the id {document!r}; give its text, or an id that is there")

    def _of_chunk(self, rag: Rag, chunk: Chunk, kind: SourceKind, score: float | None) -> Cited:
        ids = rag.template.chunk_ids(chunk)
        return Cited(Passage(ids), kind, chunk.id, chunk.document_id, chunk.title, chunk.text, score)


def require_length(tokens: int, longest: int | None) -> None:
    """Raise `ContextLengthError` where a part of a prompt already has more tokens than the model reads."""
    if longest is not None and tokens > longest:
        message = f"the prompt has more than {longest:,} tokens, all that the model reads; shorten it"
        raise ContextLengthError(message, longest)


def _without(index: ChunkIndex | None, gone: frozenset[str]) -> Sequence[Chunk]:
    """The chunks of an index but those of these uploads."""
    chunks = index.chunks if index is not None else ()
    return [one for one in chunks if not any(part_of(one.document_id, upload) for upload in gone)] if gone else chunks


def _rendered(title: str, text: str) -> str:
    return render_chunk(TitledText(title, text))


def _cited(segment: Segment) -> Cited:
    part = None if segment.whole in ((), segment.ids) else Part(segment.whole, segment.first)
    chunk, learned = segment.chunk, segment.kind == "learned"
    passage, kind = Passage(segment.ids, part), cast(SourceKind, segment.kind)
    named = (chunk.id, chunk.document_id, chunk.title) if chunk else ("", "", "")
    return Cited(passage, kind, *named, segment.text, brought=learned)
