"""The state of one tenant: its corpora, the texts it may paste, and what the server learns from its questions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blend.chunks.surrogate import with_default_surrogate, with_surrogate
from blend.corpora import corpora, in_words, index_dir, named_folders
from blend.errors import ConfigError, PromptError, StoreError
from blend.layout import PlaceOrigin, Tokens
from blend.prompt_template import TextTokenizer
from blend.serve.documents.queue import INCOMING
from blend.serve.failures import LOG, STORE_UNREACHABLE
from blend.serve.flights import Flights
from blend.serve.prompt import Kept, Prompt
from blend.serve.prompts.chat_template import ChatTemplate
from blend.serve.prompts.cutter import Cutter
from blend.serve.prompts.learned import Forgotten, LearnedCaches, Wish
from blend.serve.prompts.learned_list import LearnedTexts
from blend.serve.prompts.reuse import Texts
from blend.serve.prompts.trusted import trusted_chunks
from blend.serve.prompts.view import CorpusView
from blend.serve.reasons import EVICTED, NEW, OTHER_MODEL, Word
from blend.serve.request import ANYONE, RequestOrigin
from blend.serve.token_index import TokenIndex
from blend.text import check_corpus_name
from blend_retrieval import RetrievalError
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.layout import PromptLayout
    from blend.rag import Rag
    from blend.store import ChunkStore
    from blend_retrieval import Chunk, ChunkIndex

TENANTS = "tenants"


def tenant_root(root: Path, tenant: str) -> Path:
    """The store of a tenant within the server's; that of "" is the server's own."""
    check_corpus_name(tenant)
    return root / TENANTS / tenant if tenant else root


def kept_corpora(root: Path) -> set[tuple[str, str]]:
    """Tenant and name of every corpus that exists or has uploads."""
    roots = {tenant: tenant_root(root, tenant) for tenant in ("", *named_folders(root / TENANTS))}
    return {(tenant, name) for tenant, store in roots.items() for name in {*corpora(store), *begun_corpora(store)}}


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
        self._store = store
        self._parent = parent
        self._lock = threading.Lock()
        self._lost = False

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
        flights: compares its requests in flight; None compares none.

    """

    def __init__(
        self,
        rag: Rag,
        learn_budget: int,
        parent: StoreWatch | None = None,
        *,
        learned_by: Path | None = None,
        flights: Flights | None = None,
    ) -> None:
        self.decoder = rag.decoder
        self.template = rag.template
        self.chat = ChatTemplate(rag.decoder.tokenizer, rag.template.prefix, rag.prompt_config.chat_instructions)
        self._rags = {"": rag}
        self._lock = threading.RLock()
        self.watch = StoreWatch(self._opened_store, parent)
        self._names: tuple[str, ...] = ()
        self._indexes: dict[str, ChunkIndex] = {}
        self._leaving: dict[str, Callable[[], frozenset[str]]] = {}
        control = TextTokenizer(rag.decoder.tokenizer).control
        self._cutter = Cutter(rag.decoder.tokenizer, control, rag.decoder.operator_rows)
        self._token_indexes: dict[str, tuple[object, TokenIndex[Chunk]]] = {}
        self.learned = LearnedCaches(rag.root / "learned.sqlite", learn_budget) if learn_budget else None
        self._learned_by = LearnedTexts(learned_by) if learned_by is not None else self.learned
        self.flights = flights if self._learned_by is not None else None
        self._unlearned = ""  # why nothing was learned last

    def _opened_store(self) -> ChunkStore:
        """The store, whose budget spares pinned text."""
        store = self._rags[""].store
        learned = self.learned
        if learned is not None:
            store.backend.spared = lambda: learned.pinned
        return store

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of its corpora."""
        with suppress(OSError):
            names = corpora(self._rags[""].root)
            if names == self._names or self.watch.reachable():
                self._names = names
        return self._names

    @property
    def all_corpora(self) -> tuple[str, ...]:
        """The same, with the unnamed one, which need not exist yet."""
        return tuple(dict.fromkeys(("", *self.corpora)))

    def rag(self, corpus: str = "") -> Rag:
        """The corpus of this name, which need not exist yet.

        Raises `ConfigError` for an invalid name, `StoreError` for a new one while the store is unreachable.
        """
        with self._lock:
            if corpus not in self._rags:
                self.watch.require()
                self._rags[corpus] = self._rags[""].sibling(corpus)
            return self._rags[corpus]

    def hide(self, corpus: str, leaving: Callable[[], frozenset[str]]) -> None:
        """Never answer from the uploads of these ids, even while the index still holds them."""
        self._leaving[corpus] = leaving

    def view(self, corpus: str) -> CorpusView:
        """A corpus as it is now, or as it was last read during an outage."""
        hidden = self._leaving.get(corpus, frozenset)()  # before the index: later removals are then out of the index
        index = None
        failure = None
        try:
            index = self._index(corpus)
        except (RetrievalError, ValueError, StoreError) as error:
            failure = error
        return CorpusView(corpus, self._rags.get(corpus, self._rags[""]), index, failure, hidden, self.watch.require)

    def texts(self, view: CorpusView, user: str, *, anywhere: bool) -> Texts:
        """The texts that a prompt of this end user may hold: of this corpus, or of any."""
        views = [view]
        if anywhere:
            views += [self.view(name) for name in self.all_corpora if name != view.name]
        return Texts(
            corpora={view.name: self._token_index(view) for view in views},
            learned=self._learned_by.index(user) if self._learned_by is not None else None,
            cutter=self._cutter,
            whole=bool(self.decoder.recurrent),
            past=partial(self.learned.past, user) if self.learned is not None else lambda digest: NEW,
            in_flight=self.flights.index(user) if self.flights is not None else None,
        )

    def read_corpora(self) -> None:
        """Tokenise the corpora's chunks now, which the first prompt would wait for: about a second for a million tokens."""
        for name in self.all_corpora:
            self._token_index(self.view(name))

    def learn(
        self, library: ChunkLibrary, texts: Collection[Tokens], origin: RequestOrigin = ANYONE
    ) -> Collection[Tokens]:
        """Learn the texts that a request brought; see `LearnedCaches.admitted`. An outage is logged, once.

        May choose the surrogate context, if the store holds no choice: the operator's text or some of Python's documentation,
        never a client's text.
        """
        assert self.learned is not None
        try:
            admitted = self.learned.admitted(self._with_surrogate(library), texts, origin)
        except StoreError as error:
            if str(error) != self._unlearned:
                LOG.warning("learning_failed", extra={"why": str(error)})
            self._unlearned = str(error)
            return ()
        self._unlearned = ""
        return admitted

    def keep(self, prompt: Prompt, texts: Mapping[Tokens, float]) -> Kept:
        """Keep those texts of a prompt that fit, each for its seconds. Raises `StoreError`."""
        assert self.learned is not None
        rag = self.rag(prompt.corpus)
        library = rag.blender.library(prompt.layout.kept_behind)
        copies = 2 if rag.corpus_config.surrogate_tokens and not library.decided else 1  # contextual caches will come
        sizes = Counter[Tokens]()
        for variant in library.variants(list(texts)):
            sizes[variant.chunk] += copies * library.entry_bytes(variant)
        wishes = {text: Wish(seconds, sizes[text]) for text, seconds in texts.items()}
        pinned = self.learned.pin(wishes, prompt.request.origin)
        return Kept(
            tokens=sum(map(len, pinned)),
            of=sum(map(len, texts)),
            seconds=min((texts[text] for text in pinned), default=0.0),
        )

    def absent(self, prompt: Prompt) -> tuple[Word, ...]:
        """Why the cache of each of a prompt's passages would be missing. Asks the store nothing. Raises `StoreError`."""
        rag = self.rag(prompt.corpus)
        namespace = rag.blender.encoder(prompt.layout.kept_behind).identity.namespace
        missing = EVICTED if rag.store.backend.evictions else NEW
        places = [passage.place for passage in prompt.cited]
        learned_texts = [place.whole for place in places if place.origin is PlaceOrigin.LEARNED]
        namespaces = self.learned.namespaces(prompt.request.user, learned_texts) if self.learned is not None else {}
        of_others = {text for text, spaces in namespaces.items() if spaces and namespace not in spaces}
        return tuple(OTHER_MODEL if place.whole in of_others else missing for place in places)

    def end_session(self, user: str, session: str) -> Forgotten:
        """Forget the text that only this session of a user brought or kept. Raises `StoreError`."""
        self.watch.require()
        if self.learned is None:
            return Forgotten()
        return self.learned.end_session(self.rag().store, user, session)

    def _with_surrogate(self, library: ChunkLibrary) -> ChunkLibrary:
        """The caches with a surrogate context, if one is configured and the model has room for it."""
        rag = self.rag(library.corpus)
        config = rag.corpus_config
        if library.decided or not config.surrogate_tokens:
            return library
        with suppress(PromptError, RetrievalError):
            if not config.surrogate_text:
                return with_surrogate(library, trusted_chunks(rag), config.surrogate_tokens)
            ids = rag.template.encode(config.surrogate_text)[: config.surrogate_tokens]
            return with_default_surrogate(library, tuple(ids))
        return library

    def drop_learned(self, layout: PromptLayout, user: str) -> None:
        """Forget the learned text that a user's prompt reused. Raises `StoreError`."""
        texts = {place.stored for place in layout.places if place.origin is PlaceOrigin.LEARNED}
        if self.learned is not None:
            self.learned.drop(self.rag().store, filter(None, texts), user)

    def forget(self, texts: Collection[Tokens]) -> None:
        """Forget learned text of removed documents, which had these chunks. Raises `StoreError`."""
        if self.learned is not None:
            self.learned.forget(self.rag().store, texts)

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

    def _token_index(self, view: CorpusView) -> TokenIndex[Chunk]:
        """The tokens of a corpus's chunks."""
        with self._lock:
            version, index = self._token_indexes.get(view.name) or (None, TokenIndex())
            if version != view.version:
                before = set(index.names)
                now = set(view.chunks)
                index.update(before - now, {chunk: self.template.chunk_ids(chunk) for chunk in now - before})
                self._token_indexes[view.name] = view.version, index
            return index
