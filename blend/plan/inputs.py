"""From what an operator says to what a plan needs: the model's outline, the size of the corpus, the rates of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from blend.corpus import RATE
from blend.errors import ConfigError, StoreError
from blend.model.outline import ModelOutline, outline, read_config, read_tokenizer
from blend.model.shapes import SHAPES
from blend.plan import PromptSize, Rates, counted, from_prefill, from_profile, given, measure
from blend.prompt import PromptTemplate
from blend.store import read_words
from blend.weights import lasting_name, resolve_model

if TYPE_CHECKING:
    from blend.config import CorpusConfig
    from blend.plan import CorpusSize
    from blend_retrieval import LoadedDocuments

NO_RATES = (
    "nothing says how fast this model is here: measure it with --measure, give --prefill-rate, "
    "or name a --store that this model was precomputed into"
)


@dataclass(frozen=True)
class Subject:
    """A model to plan for, by name, or by the name of a shape out of `blend.model.shapes`; its weights are not read.

    dtype: what it computes in.
    """

    name: str
    shape: str | None
    config: CorpusConfig
    dtype: str

    @cached_property
    def location(self) -> str:
        """Where the model is."""
        return str(resolve_model(self.name))

    @cached_property
    def model(self) -> ModelOutline:
        """Sizes of its KV. Raises `ConfigError` or `UnsupportedModelError`."""
        if self.shape:
            return outline(SHAPES[self.shape].config(), self.shape)
        return outline(read_config(self.location, self.name), self.name)

    def counted(self, loaded: LoadedDocuments) -> CorpusSize:
        """The corpus of these documents."""
        if self.shape:
            raise ConfigError(
                "a --shape has no tokenizer to count documents with: give --chunks or --tokens, or a --model"
            )
        template = PromptTemplate(read_tokenizer(self.location, self.name))
        return counted(loaded, template, self.config, self.model.context)

    def given(self, chunks: int | None, tokens: int | None) -> CorpusSize:
        """A corpus of so many chunks, of so many tokens in all; with one of the two, of chunks that are full."""
        if chunks is None and tokens is None:
            raise ConfigError("no corpus to plan for: name its PATHS, or give --chunks, --tokens or both")
        mean = max(1, round(tokens / chunks)) if chunks and tokens else self.config.chunk_tokens
        return given(chunks or -(-(tokens or 0) // mean), mean, self.config)

    def prompt(self, corpus: CorpusSize, top_k: int) -> PromptSize:
        """A prompt of chunks as the corpus has them."""
        return PromptSize(corpus.prefix, corpus.surrogate, max(1, round(corpus.tokens / corpus.chunks)), top_k)

    def measured(self, prompt: PromptSize, codecs: Sequence[str], device: str) -> Rates:
        """Rates of this machine. Raises what `Decoder.load` raises."""
        from blend.model.decoder import Decoder

        if self.shape:
            raise ConfigError("a --shape has no weights to measure with: give --prefill-rate, or a --model")
        decoder = Decoder.load(self.location, name=self.name, device=device, dtype=self.dtype)
        return measure(decoder, self.model, prompt, codecs, self.config.batch_tokens)

    def of_prefill(self, rate: float, prompt: PromptSize, codecs: Sequence[str], load: float | None) -> Rates:
        """Rates out of that of full prefill, in tokens a second."""
        return from_prefill(rate, self.model, prompt, codecs, load, f"full prefill at {rate:,.0f} tokens/s, as given")

    def of_store(self, store: Path, prompt: PromptSize, codecs: Sequence[str], load: float | None) -> Rates:
        """Rates as the last long precompute into a store noted them. Raises `ConfigError` where none did."""
        if not (store / "kv").is_dir():
            raise ConfigError(NO_RATES)
        try:
            described = read_words(store / "kv").values()
        except StoreError:
            raise ConfigError(NO_RATES) from None
        me = (lasting_name(self.name), self.dtype)
        mine = [words for words in described if (words.get("model"), words.get("dtype")) == me]
        rates = [float(words[RATE]) for words in mine if words.get(RATE, "").replace(".", "", 1).isdigit()]
        if not rates:
            raise ConfigError(NO_RATES)
        source = f"a precompute into {store} at {rates[0]:,.0f} tokens/s"
        return from_profile(rates[0], self.model, prompt, codecs, load, source)
