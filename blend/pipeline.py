"""Retrieve, blend, generate: answers to questions over a precomputed corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend.blender import Blend, Blender
from blend.config import DEFAULT_MODEL, BlendConfig, CorpusConfig, PromptConfig
from blend.decoder import Decoder
from blend.errors import PromptError
from blend.generate import Generation, OnText, generate
from blend.precompute import Precomputed, Progress, precompute
from blend.prompt import PromptTemplate
from blend.reference import full_prefill
from blend.store import open_store
from blend.timing import Stopwatch
from blend.weights import resolve_model
from retrieval import ChunkIndex, RankedChunk, Retriever, load_embedder

if TYPE_CHECKING:
    from blend.store import ChunkStore
    from retrieval import Embedder

DEFAULT_STORE = ".kvblend"


@dataclass(frozen=True)
class FullAnswer:
    """The same prompt answered after the model's own full prefill."""

    text: str
    ttft_s: float


@dataclass(frozen=True)
class Answer:
    """An answer and how it came about.

    chunks: what was retrieved, best first, in prompt order; `blend.hits` says which came out of the store. ttft_s: seconds
    to the first token, retrieval apart. stages: seconds by stage, retrieval included. full: only when asked to compare.
    """

    question: str
    text: str
    chunks: tuple[RankedChunk, ...]
    blend: Blend
    generation: Generation
    full: FullAnswer | None = None
    problems: tuple[str, ...] = field(default=())

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage."""
        return dict(self.blend.stages)

    @property
    def ttft_s(self) -> float:
        """Seconds from the query to the first token, retrieval apart."""
        return self.blend.ttft_s - self.stages.get("retrieve", 0.0)


class Rag:
    """A decoder, a store of chunk caches and an index of chunks, in one directory `store`.

    model: a catalog name, a HuggingFace id or a model directory. Everything heavy is loaded on first use.
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
        on_fetch: Callable[..., Any] | None = None,
    ) -> None:
        self.root = Path(store).expanduser()
        self.blend_config = blend or BlendConfig()
        self.corpus_config = corpus or CorpusConfig()
        self._prompt_config = prompt or PromptConfig()
        self._model, self._device, self._dtype = model, device, dtype
        self._budget_bytes, self._on_fetch = budget_bytes, on_fetch

    @property
    def index_dir(self) -> Path:
        """Where the index lies."""
        return self.root / "index"

    @cached_property
    def store(self) -> ChunkStore:
        """The store of chunk caches."""
        return open_store(self.root / "kv", codec=self.corpus_config.codec, budget_bytes=self._budget_bytes)

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder."""
        location = resolve_model(self._model, progress=self._on_fetch)
        return Decoder.load(str(location), name=self._model, device=self._device, dtype=self._dtype)

    @cached_property
    def template(self) -> PromptTemplate:
        """The prompt around the chunks."""
        return PromptTemplate(self.decoder.tokenizer, self._prompt_config)

    @cached_property
    def embedder(self) -> Embedder:
        """The embedding model."""
        return load_embedder(self.corpus_config.embedder)

    @cached_property
    def blender(self) -> Blender:
        """Blended prefill over the store."""
        return Blender(self.decoder, self.store, self.blend_config)

    @cached_property
    def retriever(self) -> Retriever:
        """The search over the index. Raises `RetrievalError` where no corpus was precomputed."""
        return Retriever(ChunkIndex.load(self.index_dir, self.embedder), self.embedder)

    def precompute(
        self, paths: Iterable[str | Path], *, add: bool = False, progress: Progress | None = None
    ) -> Precomputed:
        """Index the documents under `paths` and compute their chunk caches; see `precompute.precompute`."""
        self.__dict__.pop("retriever", None)
        return precompute(
            paths,
            decoder=self.decoder,
            template=self.template,
            embedder=self.embedder,
            store=self.store,
            index_dir=self.index_dir,
            config=self.corpus_config,
            add=add,
            **({"progress": progress} if progress else {}),
        )

    def warm_up(self) -> None:
        """Load everything and run the prefix, so that the first question is not charged for it."""
        self.retriever.search("warm up", 1)
        self.blender.encoder(self.template.prefix)

    def answer(
        self,
        question: str,
        *,
        top_k: int | None = None,
        max_new_tokens: int = 128,
        compare: bool = False,
        on_text: OnText | None = None,
        **options: Any,
    ) -> Answer:
        """Retrieve chunks, blend their caches, decode; afterwards compute and store the caches that were missing.

        compare: also answer after full prefill of the same ids. on_text: gets the answer piece by piece. options: those of
        `model.generate`, such as `do_sample=True`. Raises `PromptError` for a question that nothing can be found for.
        """
        self.warm_up()
        watch = Stopwatch(self.decoder.device)
        with watch.stage("retrieve"):
            ranked = self.retriever.search(question, top_k or self.corpus_config.top_k)
            layout = self.template.layout(question, [hit.chunk for hit in ranked])
        if not ranked:
            raise PromptError("the index holds no chunks; run `blend precompute` on your documents first")
        blend = self.blender.prefill(layout, room=max_new_tokens, watch=watch)
        generation = generate(
            self.decoder, blend, layout.token_ids, max_new_tokens=max_new_tokens, on_text=on_text, **options
        )
        self.blender.remember(blend)
        full = self._full_answer(blend, max_new_tokens, options) if compare else None
        return Answer(question, generation.text, ranked, blend, generation, full, blend.problems)

    def _full_answer(self, blend: Blend, max_new_tokens: int, options: dict[str, Any]) -> FullAnswer:
        full = full_prefill(self.decoder, blend.layout)
        text = generate(self.decoder, full, blend.layout.token_ids, max_new_tokens=max_new_tokens, **options).text
        return FullAnswer(text, full.ttft_s)
