"""Retrieve, blend, generate: answers to questions over a precomputed corpus."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from blend.answering import NONE_RETRIEVED, Answer, full_answer, rehearse, remember, room_for
from blend.blender import Blender
from blend.config import ANSWER_TOKENS, DEFAULT_MODEL, DEFAULT_STORE, BlendConfig, CorpusConfig, PromptConfig
from blend.corpora import corpora, index_dir, require_corpus
from blend.errors import ConfigError, PromptError
from blend.lazy import loaded_once
from blend.model.decoder import Decoder, full_prefill, pick_device
from blend.model.generate import OnText, generate
from blend.precompute import Precomputed, precompute
from blend.prompt import PromptTemplate
from blend.sharing import Sharing
from blend.store import open_store
from blend.store.addresses import is_address, origin_of, replica_of
from blend.timing import Progress, Stopwatch, no_progress
from blend.types import PromptLayout
from blend.weights import lasting_name, resolve_model
from blend_retrieval import (
    ChunkIndex,
    CurrentIndex,
    LoadedDocuments,
    RetrievalError,
    Retriever,
    load_documents,
    load_embedder,
)
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.store import ChunkStore
    from blend.store.memory import MemoryCache
    from blend_retrieval import Embedder


def _replica(address: str, cache: str | Path | None, hot: str | None) -> Path:
    return replica_of(address, None if cache is None else Path(cache).expanduser(), hot)


class Rag:
    """A decoder, a store of chunk caches and an index of chunks, in one directory `store`, or shared at one address.

    model: a catalog name, a HuggingFace id or a model directory. corpus: how documents become chunks, and which of the store's
    corpora it is. budget_bytes, store_key: see `open_store`. decoder, embedder, kv: those of another `Rag` that this one is to
    share, kv being its `store`. memory: where recently read chunk caches are kept, which several may share. cache, hot: of a
    store at an address, see `replica_of`. Everything heavy is loaded on first use. Threads may ask at the same time, also while
    one precomputes; what another process precomputes is seen.
    """

    def __init__(
        self,
        store: str | Path = DEFAULT_STORE,
        *,
        model: str = DEFAULT_MODEL,
        device: str = "auto",
        dtype: str = "auto",
        blend: BlendConfig | None = None,
        prompt: PromptConfig | None = None,
        corpus: CorpusConfig | None = None,
        budget_bytes: int | None = None,
        store_key: bytes | None = None,
        on_fetch: Progress = no_progress,
        decoder: Decoder | None = None,
        embedder: Embedder | None = None,
        kv: ChunkStore | None = None,
        memory: MemoryCache | None = None,
        cache: str | Path | None = None,
        hot: str | None = None,
    ) -> None:
        self._shared, self._memory = (decoder, embedder, kv), memory
        self.loading = RLock()
        self.root = Path(store).expanduser() if not is_address(store) else _replica(str(store), cache, hot)
        self._sharing = Sharing(self.root, lambda: self.store)
        self._retriever: Retriever | None = None
        self._store_key = store_key
        self.blend_config = blend or BlendConfig()
        self.corpus_config = corpus or CorpusConfig()
        self._index = CurrentIndex(index_dir(self.root, self.corpus_config.name))
        self.prompt_config = prompt or PromptConfig()
        self.model, self._device, self._dtype = lasting_name(model), device, dtype
        self._budget_bytes, self._on_fetch = budget_bytes, on_fetch
        self._rehearsed: PromptLayout | None = None
        self._rehearsed_full = False

    def sibling(self, corpus: str, root: Path | None = None) -> Rag:
        """Another corpus of the store, or one of the store in `root`, with the same options, decoder and embedder.

        Raises `ConfigError` for what cannot name a corpus.
        """
        kv = self.store if root is None or root == self.root else None
        other = Rag(
            root or self.root,
            model=self.model,
            blend=self.blend_config,
            prompt=self.prompt_config,
            corpus=replace(self.corpus_config, name=corpus),
            budget_bytes=self._budget_bytes,
            store_key=self._store_key,
            decoder=self.decoder,
            embedder=self.embedder,
            kv=kv,
            memory=self._memory,
        )
        with suppress(RetrievalError, ConfigError):  # there is no corpus yet, or asking it will say what is wrong
            if other.index.embedder != self.embedder.name:
                other._shared = self.decoder, load_embedder(other.index.embedder), kv
        return other

    def recipe(self) -> dict[str, Any]:
        """The arguments that make the same `Rag` in another process that sees the same places; it computes in this dtype.

        A store at an address is named by that: other machines have a directory of their own that stands for it.
        """
        origin = origin_of(self.root / "kv")
        place = {"store": self.root.absolute()} if origin is None else {"store": origin.address, "hot": origin.hot}
        return {
            **place,
            "model": self.model,
            "device": self._device,
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "blend": self.blend_config,
            "prompt": self.prompt_config,
            "corpus": self.corpus_config,
            "budget_bytes": self._budget_bytes,
            "store_key": self._store_key,
        }

    @property
    def index_dir(self) -> Path:
        """Where the index lies."""
        return self._index.directory

    @loaded_once
    def store(self) -> ChunkStore:
        """The store of chunk caches."""
        if self._shared[2] is not None:
            return self._shared[2]
        codec = self.corpus_config.codec
        return open_store(
            self.root / "kv",
            codec=codec,
            budget_bytes=self._budget_bytes,
            key=self._store_key,
            memory_bytes=self._memory,
        )

    @loaded_once
    def decoder(self) -> Decoder:
        """The decoder."""
        if self._shared[0] is not None:
            return self._shared[0]
        pick_device(self._device)  # before weights are fetched in vain
        location = resolve_model(self.model, progress=self._on_fetch)
        return Decoder.load(str(location), name=self.model, device=self._device, dtype=self._dtype)

    @loaded_once
    def template(self) -> PromptTemplate:
        """The prompt around the chunks."""
        return PromptTemplate(self.decoder.tokenizer, self.prompt_config)

    @loaded_once
    def embedder(self) -> Embedder:
        """The embedding model."""
        return self._shared[1] or load_embedder(self.corpus_config.embedder)

    @loaded_once
    def blender(self) -> Blender:
        """Blended prefill over the store."""
        return Blender(self.decoder, self.store, self.blend_config, corpus=self.corpus_config.name)

    @property
    def index(self) -> ChunkIndex:
        """The chunks of the corpus as they are now.

        Raises `RetrievalError` where none was precomputed, `ConfigError` where only other corpora were.
        """
        self._sharing.refresh()
        try:
            return self._index.get()
        except IndexMissingError:
            require_corpus(self.root, self.corpus_config.name)
            raise

    @property
    def retriever(self) -> Retriever:
        """The search over the index. Raises `RetrievalError` as `index` does, and when another embedder made it."""
        index, held = self.index, self._retriever
        if held is None or held.index is not index:
            self._retriever = held = Retriever(index, self.embedder, self.corpus_config.min_score)
        return held

    def take_embedder_of_index(self) -> None:
        """Search with the embedder that made the index, where there is one; for whoever names none himself."""
        with suppress(IndexMissingError, ConfigError):
            self.corpus_config = replace(self.corpus_config, embedder=self.index.embedder)

    def refresh(self) -> None:
        """Take up at once what other machines have made of the corpora of a shared store. Raises `StoreError`."""
        self._sharing.refresh(now=True)

    def precompute(
        self,
        documents: str | Path | Iterable[str | Path] | LoadedDocuments,
        *,
        add: bool = False,
        quick: bool = False,
        progress: Progress = no_progress,
    ) -> Precomputed:
        """Index documents, or those under paths, and compute their chunk caches; see `precompute.precompute`.

        Then the KV corrections are measured, where the store holds none or most of the corpus is new; neither with `quick`.
        Documents are read and the store is opened before any model is loaded, so that mistakes show at once.
        """
        loaded = documents if isinstance(documents, LoadedDocuments) else load_documents(documents)
        store = self.store
        self.refresh()
        done = precompute(
            loaded,
            embedder=self.embedder,
            decoder=self.decoder,
            template=self.template,
            store=store,
            index_dir=self.index_dir,
            config=self.corpus_config,
            others=self.other_corpora,
            add=add,
            quick=quick,
            progress=progress,
        )
        if not quick:
            self.calibrate(anew=done.computed > done.reused, progress=progress)
        store.advance()
        return done

    @property
    def other_corpora(self) -> dict[str, Path]:
        """Name and index directory of the store's other corpora."""
        mine = self.corpus_config.name
        return {other: index_dir(self.root, other) for other in corpora(self.root) if other != mine}

    def calibrate(self, *, anew: bool, progress: Progress = no_progress) -> None:
        """Measure the KV corrections on the corpus as it is, where there are none or they are to be measured `anew`."""
        chunks = [self.template.chunk_ids(chunk) for chunk in self.index.chunks]
        self.blender.calibrate(self.template.prefix, chunks, anew=anew, progress=progress)

    def warm_up(self, *, compare: bool = False) -> None:
        """Load everything, what can be wrong and is cheap first, and rehearse a question, so that the first is not charged.

        compare: rehearse full prefill too. Nothing is stored; a second call does nothing.
        """
        if self._rehearsed is None:
            _ = self.index, self.store
            self.retriever.search("warm up", 1)
            _ = self.blender.encoder(self.template.prefix).prefix
            for contextual, first in (
                ((False, False), (True, False), (True, True)) if self.blend_config.correction else ()
            ):
                self.blender.correction(self.template.prefix, contextual=contextual, first=first)
            self._rehearsed = rehearse(self.decoder, self.template, self.blend_config)
        if compare and not self._rehearsed_full:
            full_prefill(self.decoder, self._rehearsed)
            self._rehearsed_full = True

    def answer(
        self,
        question: str,
        *,
        top_k: int | None = None,
        max_new_tokens: int = ANSWER_TOKENS,
        compare: bool = False,
        on_text: OnText | None = None,
        **options: Any,
    ) -> Answer:
        """Retrieve chunks, blend their caches, decode; afterwards compute and store the caches that were missing.

        compare: also answer after full prefill of the same ids. on_text: gets the answer piece by piece. options: those of
        `model.generate`, such as `do_sample=True`. Raises `PromptError` for an empty question, an index without chunks, and a
        prompt that leaves no room for an answer in the model's context.
        """
        if not question.strip():
            raise PromptError("the question is empty; ask something")
        self.warm_up(compare=compare)
        watch = Stopwatch(self.decoder.device)
        with watch.stage("retrieve"):
            ranked = self.retriever.search(question, self.corpus_config.top_k if top_k is None else top_k)
            layout = self.template.layout(question, [hit.chunk for hit in ranked])
        if not len(self.index):
            raise PromptError("the index holds no chunks; run `blend precompute` on your documents first")
        room = room_for(self.decoder, layout, max_new_tokens)
        blend = self.blender.prefill(layout, room=room, watch=watch)
        generation = generate(self.decoder, blend, layout.token_ids, max_new_tokens=room, on_text=on_text, **options)
        problems = remember(self.blender, blend)
        if not ranked:
            problems = (*problems, NONE_RETRIEVED)
        full = full_answer(self.decoder, blend, room, options) if compare else None
        cut = len(generation.token_ids) >= room and generation.token_ids[-1] not in self._stop_ids
        return Answer(question, generation.text, ranked, blend, generation, full, cut, problems)

    @cached_property
    def _stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ids = self.decoder.model.generation_config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or ())
