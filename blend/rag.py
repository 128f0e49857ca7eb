"""Retrieve, blend, generate: answers to questions over a precomputed corpus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

from blend.answers import NONE_RETRIEVED, Answer, FullAnswer
from blend.chunks.fit import neutral_correction
from blend.chunks.probe import take_held_dtype
from blend.config import (
    ANSWER_TOKENS,
    DEFAULT_EMBEDDER,
    DEFAULT_MODEL,
    DEFAULT_STORE,
    WHOLE,
    BlendConfig,
    CorpusConfig,
    PromptConfig,
    Share,
)
from blend.corpora import Sharing, corpora, index_dir, indexes_named, require_corpus
from blend.corpus import Compute, Corpus, Precomputed, compute_here, precompute
from blend.errors import ConfigError, PromptError, StoreError
from blend.layout import PromptLayout
from blend.model.decoder import Decoder, full_prefill, pick_device
from blend.model.device_path import DevicePath
from blend.model.engines import TRANSFORMERS, check_engine, load_engine
from blend.model.generate import OnText, end_tokens, generate
from blend.model.precision import check_weights
from blend.prefill.blender import Blend, Blender
from blend.prompt_template import PromptTemplate
from blend.ranges import check_number
from blend.stopwatch import Progress, Stopwatch, no_progress
from blend.store import open_store
from blend.store.addresses import is_address, origin_of, replica_of
from blend.types import CacheKind, dtype_name
from blend.verified import UNCHECKED
from blend.weights import lasting_name, resolve_model
from blend_retrieval import (
    ChunkIndex,
    CurrentIndex,
    LoadedDocuments,
    RankedChunks,
    RetrievalError,
    Retriever,
    load_documents,
    load_embedder,
    load_embedder_or_words,
)
from blend_retrieval.embedders import BY_WORDS
from blend_retrieval.errors import IndexMissingError

if TYPE_CHECKING:
    from blend.store import ChunkStore
    from blend.store.pool import ChunkPool
    from blend_retrieval import Embedder, Reranker

_Value = TypeVar("_Value")


class loaded_once(cached_property[_Value]):  # noqa: N801
    """A `cached_property` that only one thread loads: since Python 3.12 that has no lock.

    The lock, the object's `loading`, is one for all its properties, because loading one may ask for others.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> _Value:  # type: ignore[override]
        """Called only until the value stands in the object itself."""
        if instance is None:
            return self  # type: ignore[return-value]  # of the class, for tools that read its documentation
        values = vars(instance)
        with instance.loading:
            if self.func.__name__ not in values:
                values[self.func.__name__] = self.func(instance)
        return values[self.func.__name__]  # type: ignore[no-any-return]


class Rag:
    """Answers questions over a precomputed corpus.

    Everything heavy is loaded on first use. Threads may ask at the same time, also while one precomputes. What another process
    precomputes is seen.

    >>> from blend import Rag
    >>> rag = Rag("my-store", model="my-model")
    >>> rag.precompute(["docs"]).documents
    8
    >>> answer = rag.answer("How many gates does the harbour have?", max_new_tokens=8)
    >>> [hit.chunk.title for hit in answer.chunks][:1], answer.blend.hits[:1]
    (['The harbour'], (True,))

    Args:
        store: Directory of chunk caches and index, or the address of a shared store such as s3://bucket/name.
        model: Catalog name, HuggingFace id or model directory.
        device: auto, cpu, cuda or cuda:N.
        dtype: What the model computes in: float32, bfloat16, float16, or auto: bfloat16 on a GPU, the faster of the first two
            on a CPU. Caches that the store holds in another dtype are used where a probe shows that they are alike.
        weights: native, or int8: weights and activations of 8 bits in all linear layers, on a CPU.
        device_path: auto uses kernels and CUDA graphs that prove themselves on the GPU; eager does without.
        engine: Who computes: transformers, or llamacpp for a GGUF file as `model`, in llama.cpp.
        engine_options: Of llama.cpp: tokens of its context, threads, cache_type (f16 or q8_0), ubatch, library, tokenizer.
        blend: How prompts are blended.
        prompt: What stands around the chunks in a prompt.
        corpus: How documents become chunks, and which of the store's corpora to use.
        budget_bytes: Most bytes of chunk caches; the least recently used are evicted.
        store_key: Key that seals the store's entries; entries sealed otherwise are not used.
        on_fetch: Called with the progress of fetching and loading weights.
        decoder: A loaded decoder to use instead of `model`.
        embedder: A loaded embedding model to use instead of the corpus's.
        memory: Memory tier for the most used chunk caches; several `Rag` may share it.
        cache: Of a store at an address: the directory that keeps what is read from it.
        hot: Of a store at an address: a Redis in front of it, as redis://host:port/db.

    Raises:
        ConfigError: For an address that names no store, and for a device or weights that this machine cannot use.

    """

    def __init__(
        self,
        store: str | Path = DEFAULT_STORE,
        *,
        model: str = DEFAULT_MODEL,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "native",
        device_path: DevicePath = "auto",
        engine: str = TRANSFORMERS,
        engine_options: Mapping[str, Any] | None = None,
        blend: BlendConfig | None = None,
        prompt: PromptConfig | None = None,
        corpus: CorpusConfig | None = None,
        budget_bytes: int | None = None,
        store_key: bytes | None = None,
        on_fetch: Progress = no_progress,
        decoder: Decoder | None = None,
        embedder: Embedder | None = None,
        memory: ChunkPool | None = None,
        cache: str | Path | None = None,
        hot: str | None = None,
    ) -> None:
        self._computing: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "weights": weights,
            "device_path": device_path,
        }
        check_engine(engine, self._computing)
        if decoder is None and engine == TRANSFORMERS:
            check_weights(weights, pick_device(device))  # before anything is written or fetched in vain
        self.loading = RLock()
        self._memory = memory
        if decoder is not None:
            self.decoder = decoder
        if embedder is not None:
            self.embedder = embedder
        if is_address(store):
            self.root = replica_of(str(store), None if cache is None else Path(cache).expanduser(), hot)
        else:
            self.root = Path(store).expanduser()
        self._sharing = Sharing(self.root, lambda: self.store)
        self._retriever: Retriever | None = None
        self._store_key = store_key
        self.blend_config = blend or BlendConfig()
        self.corpus_config = corpus or CorpusConfig()
        self._index = CurrentIndex(index_dir(self.root, self.corpus_config.name))
        self.prompt_config = prompt or PromptConfig()
        self.model = lasting_name(model)
        self._engine: dict[str, Any] = {"engine": engine, "engine_options": engine_options or {}}
        self._budget_bytes = budget_bytes
        self._on_fetch = on_fetch
        self._rehearsed: PromptLayout | None = None
        self._rehearsed_full = False

    def sibling(self, corpus: str, root: Path | None = None) -> Rag:
        """A `Rag` for another corpus with the same options, decoder and embedder. root: of another store's directory.

        Raises `ConfigError` for a name that cannot be a corpus's.
        """
        rag = Rag(
            root or self.root,
            **self._common,
            corpus=replace(self.corpus_config, name=corpus),
            decoder=self.decoder,
            embedder=self.embedder,
            memory=self._memory,
        )
        if rag.root == self.root:
            rag.store = self.store
        with suppress(RetrievalError, ConfigError):  # no such corpus yet, or a question will raise it again
            if not self.embedder.made(rag.index.embedder):
                rag.embedder = load_embedder(rag.index.embedder)
        return rag

    def recipe(self) -> dict[str, Any]:
        """Arguments for the same `Rag` in another process; dtype and store address are resolved."""
        origin = origin_of(self.root / "kv")
        store = {"store": self.root.absolute()} if origin is None else {"store": origin.address, "hot": origin.hot}
        computing = dict(self._computing)
        if self._engine["engine"] == TRANSFORMERS:
            computing["dtype"] = dtype_name(self.decoder.dtype)
        return {**store, **self._common, **computing, **self._engine, "corpus": self.corpus_config}

    @property
    def _common(self) -> dict[str, Any]:
        """Arguments that the corpora of a server, and the processes of a precompute, have in common."""
        return {
            "model": self.model,
            "blend": self.blend_config,
            "prompt": self.prompt_config,
            "budget_bytes": self._budget_bytes,
            "store_key": self._store_key,
        }

    @property
    def index_dir(self) -> Path:
        """Directory of the index."""
        return self._index.directory

    @loaded_once
    def store(self) -> ChunkStore:
        """The store of chunk caches."""
        return open_store(
            self.root / "kv",
            codec=self.corpus_config.codec,
            budget_bytes=self._budget_bytes,
            key=self._store_key,
            memory_bytes=self._memory,
        )

    @loaded_once
    def decoder(self) -> Decoder:
        """The decoder."""
        if self._engine["engine"] != TRANSFORMERS:
            return load_engine(model=self.model, **self._engine)
        location = resolve_model(self.model, progress=self._on_fetch)
        decoder = Decoder.load(str(location), name=self.model, **self._computing, progress=self._on_fetch)
        with suppress(StoreError):  # it will be reported when caches are needed
            take_held_dtype(self.store, decoder)
        return decoder

    @loaded_once
    def template(self) -> PromptTemplate:
        """The prompt around the chunks."""
        return PromptTemplate(self.decoder.tokenizer, self.prompt_config)

    @loaded_once
    def embedder(self) -> Embedder:
        """The embedding model.

        Where the default one cannot be had, a new corpus is found by words, which a warning says. It stays so.
        """
        name = self.corpus_config.embedder
        if name != DEFAULT_EMBEDDER:
            return load_embedder(name)
        try:
            made_by = self.index.embedder
        except (IndexMissingError, ConfigError):
            return load_embedder_or_words(name)
        except RetrievalError:
            made_by = name  # damaged; whoever made it
        return load_embedder(BY_WORDS if made_by == BY_WORDS else name)

    @loaded_once
    def reranker(self) -> Reranker | None:
        """The cross-encoder, if one is named."""
        from blend_retrieval import Reranker

        return Reranker(self.corpus_config.reranker) if self.corpus_config.reranker else None

    @loaded_once
    def blender(self) -> Blender:
        """Blended prefill over the store."""
        return Blender(self.decoder, self.store, self.blend_config, corpus=self.corpus_config.name)

    @property
    def index(self) -> ChunkIndex:
        """The corpus's chunks as they are now.

        Raises `RetrievalError` if none were precomputed, `ConfigError` if only other corpora were.
        """
        self._sharing.refresh()
        try:
            with indexes_named(self.root):
                return self._index.get()
        except IndexMissingError:
            require_corpus(self.root, self.corpus_config.name)
            raise

    @property
    def retriever(self) -> Retriever:
        """The search over the index. Raises `RetrievalError` as `index` does, and when another embedder made it."""
        index = self.index
        retriever = self._retriever
        if retriever is None or retriever.index is not index:
            retriever = Retriever(index, self.embedder, self.corpus_config.min_score, self.reranker)
            self._retriever = retriever
        return retriever

    def retrieve(self, question: str, top_k: int | None = None) -> tuple[RankedChunks, PromptLayout]:
        """The chunks for a question, best first, and the prompt with them. top_k: by default the configuration's."""
        ranked = self.retriever.search(question, self.corpus_config.top_k if top_k is None else top_k)
        return ranked, self.template.layout(question, [hit.chunk for hit in ranked])

    def take_embedder_of_index(self) -> None:
        """Search with the embedder that made the index, if there is one."""
        with suppress(IndexMissingError, ConfigError):
            self.corpus_config = replace(self.corpus_config, embedder=self.index.embedder)

    def refresh(self) -> None:
        """Fetch now what other machines have published to a shared store. Raises `StoreError`."""
        self._sharing.refresh(now=True)

    def precompute(
        self,
        documents: str | Path | Iterable[str | Path] | LoadedDocuments,
        *,
        add: bool = False,
        quick: bool = False,
        share: Share = WHOLE,
        compute: Compute = compute_here,
        progress: Progress = no_progress,
    ) -> Precomputed:
        """Index documents, compute their chunk caches and fit the KV corrections.

        The corpus becomes exactly these documents. Chunks that did not change are not computed again, and a stopped run goes on
        where it was. Documents are read and the store is opened before any model is loaded, so that mistakes show at once.

        Args:
            documents: Loaded documents, or paths of files and folders.
            add: Keep the documents that the corpus holds.
            quick: Compute one cache a chunk and fit no correction: enough for a first answer.
            share: Compute only this share of the caches; whichever share finds all caches stored fits the corrections.
            compute: What computes and stores the missing caches; by default this process.
            progress: Called with stage, done and total.

        Returns:
            What was done.

        Raises:
            RetrievalError: If nothing can be indexed, or the index to add to cannot be read.
            StoreError: If the store cannot be written, or evicts indexes.

        """
        loaded = documents if isinstance(documents, LoadedDocuments) else load_documents(documents)
        store = self.store
        store.backend.require_lasting()
        self.refresh()
        corpus = self.corpus()
        with indexes_named(self.root):
            result = precompute(corpus, loaded, add=add, quick=quick, share=share, compute=compute, progress=progress)
        self._sharing.require_published(self.corpus_config.name)
        if not quick and not result.shares_left:
            self.calibrate(anew=result.computed > result.reused, progress=progress)
        store.advance()
        return result

    def corpus(self) -> Corpus:
        """The corpus, as one change of it needs it."""
        config = self.corpus_config
        return Corpus(
            decoder=self.decoder,
            template=self.template,
            embedder=lambda: self.embedder,
            store=self.store,
            index_dir=self.index_dir,
            config=config,
            sharing=self._sharing,
            others={name: index_dir(self.root, name) for name in corpora(self.root) if name != config.name},
        )

    def calibrate(self, *, anew: bool, progress: Progress = no_progress) -> None:
        """Fit the KV corrections on the corpus if there are none, or `anew`."""
        chunks = [self.template.chunk_ids(chunk) for chunk in self.index.chunks]
        self.blender.calibrate(self.template.prefix, chunks, anew=anew, progress=progress)

    def warm_up(self, *, compare: bool = False) -> None:
        """Load everything and rehearse a question, so that the first answer pays for neither.

        Nothing is stored; a second call does nothing.

        Args:
            compare: Rehearse full prefill too.

        """
        if self._rehearsed is None:
            _ = self.index, self.store
            self.retriever.search("warm up", 1)
            _ = self.blender.encoder(self.template.prefix).prefix
            for kind in CacheKind if self.blend_config.correction else ():
                self.blender.correction(self.template.prefix, kind)
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
        """Answer a question: retrieve chunks, blend their caches, decode. Then store the caches that were missing.

        Args:
            question: The question.
            top_k: Chunks to retrieve; by default the corpus configuration's.
            max_new_tokens: Longest answer.
            compare: Also answer after full prefill of the same token ids.
            on_text: Called with the answer piece by piece.
            options: Options of transformers' `generate`, such as `do_sample=True`.

        Returns:
            The answer, with times, chunks and problems.

        Raises:
            PromptError: For an empty question, an empty index, or a prompt that leaves no room for an answer.
            RetrievalError: If no corpus was precomputed.

        """
        if not question.strip():
            raise PromptError("the question is empty; ask something")
        self.warm_up(compare=compare)
        watch = Stopwatch(self.decoder.device)
        with watch.stage("retrieve"):
            ranked, layout = self.retrieve(question, top_k)
        if not len(self.index):
            raise PromptError("the index holds no chunks; run `blend precompute` on your documents first")
        check_number("max_new_tokens", max_new_tokens)
        room = self.decoder.answer_length(layout.rows, max_new_tokens)
        trusted = self.blender.trusted
        if not trusted:
            layout = layout.all_plain()
        blend = self.blender.prefill(layout, room=room, watch=watch)
        generation = generate(self.decoder, blend, layout.token_ids, max_new_tokens=room, on_text=on_text, **options)
        problems = remember(self.blender, blend)
        if not trusted:
            problems = (*problems, f"full prefill: {UNCHECKED}")
        if not ranked:
            problems = (*problems, NONE_RETRIEVED)
        full = None
        if compare:
            full_blend = full_prefill(self.decoder, blend.layout)
            full_generation = generate(self.decoder, full_blend, layout.token_ids, max_new_tokens=room, **options)
            full = FullAnswer(full_generation.text, full_blend.ttft_s)
        end_ids = end_tokens(self.decoder.model.generation_config)
        cut = len(generation.token_ids) >= room and generation.token_ids[-1] not in end_ids
        return Answer(question, generation.text, ranked, blend, generation, full, cut, problems)


def rehearse(decoder: Decoder, template: PromptTemplate, config: BlendConfig) -> PromptLayout:
    """Run a short blended prefill with one stored and one computed chunk, so that every step has run once.

    On a GPU the chunks are longer and have a KV correction, so that the kernels of ordinary prompts are compiled.
    """
    on_gpu = decoder.device.type == "cuda"
    text = template.encode("One chunk, stored or not, as long as a paragraph. " * (60 if on_gpu else 4))
    suffix = template.layout("Is everything ready?", []).suffix
    layout = PromptLayout.of_chunks(template.prefix[:1], (tuple(text), tuple(text[1:])), suffix)
    blender = Blender(decoder, open_store("memory:"), config)
    library = blender.library(layout.prefix)
    library.compute(library.missing(layout.chunks[:1]))
    if on_gpu:
        neutral = neutral_correction(decoder.rotations).to_bytes()
        blender.store.write_artifact(library.isolated.identity.correction_name, neutral)
        blender.prefill(layout)  # which brings the chunk into memory
    blender.prefill(layout)
    return layout


def remember(blender: Blender, blend: Blend) -> tuple[str, ...]:
    """Store the missing caches; returns the problems in words. A store that cannot be written does not fail the answer."""
    mend = "answered without it; `blend precompute` makes it again"
    problems = (*blend.notes, *(f"{mend}: {problem}" for problem in blend.artifact_problems))
    try:
        blender.remember(blend)
    except StoreError as error:
        refused = (f"recomputed for this answer: {problem}" for problem in blend.problems)
        return (*problems, *refused, f"what was computed for this answer could not be stored: {error}")
    return (*problems, *(f"recomputed and replaced: {problem}" for problem in blend.problems))
