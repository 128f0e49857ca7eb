"""Methods for KVShareArena's contract: set up, build a source's cache, answer from caches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from blend.chunks.surrogate import with_surrogate
from blend.config import BlendConfig, CorpusConfig, PromptConfig
from blend.errors import ConfigError, first_line
from blend.eval.evaluator import PLAIN_REUSE
from blend.layout import PromptLayout
from blend.model.decoder import Decoder, FullPrefill, full_prefill
from blend.model.generate import generate
from blend.prefill.blender import Blend, Blender
from blend.prompt_template import PromptTemplate
from blend.store import open_store
from blend.weights import resolve_model

SELECTIVE, ALIGNED = 1, 3  # the arena's classes: selective recomputation, position alignment
PUBLISHED = BlendConfig(selector="hkvd", ratio=0.15, mask="bottom-right", correction=False, surrogate=False)
COSTS = (
    "recomputed_layer_tokens: payload tokens run at answer time, summed over layers, those of the selection's layers included; "
    "the question's pass over the caches, which runs no payload token, is in aux.question_layer_tokens. "
    "kv_bytes: stored payload KV read for the answer; kvblend keeps a second cache of each source, "
    "so that its store has about twice as much. ttft_ms: from the call to the first token's id on the host, caches in memory. "
    "aux.build_s: seconds of computing the caches of sources that the store lacked."
)


class Arm(NamedTuple):
    """A method under its name in the arena.

    Attributes:
        name: as `kva methods` lists it.
        config: how it blends; None is full prefill.
        mechanism: the arena's class of mechanisms.
        provenance: the arena's word for who wrote it.
        reads: whether it sees the sources at all.

    """

    name: str
    config: BlendConfig | None
    mechanism: int
    provenance: str
    reads: bool = True


FLOOR, CEILING, REUSE = "kvblend_no_context", "kvblend_full_prefill", "kvblend_plain_reuse"
ARMS = (
    Arm(FLOOR, None, 0, "reference", reads=False),
    Arm(CEILING, None, 0, "reference"),
    Arm(REUSE, PLAIN_REUSE, ALIGNED, "reference"),
    Arm("kvblend_published_15", PUBLISHED, SELECTIVE, "port"),
    Arm("kvblend_5", BlendConfig(ratio=0.05), SELECTIVE, "official"),
    Arm("kvblend_15", BlendConfig(ratio=0.15), SELECTIVE, "official"),
)


class Source(NamedTuple):
    """A source whose caches the store holds. build_s: seconds that they took; 0 if they were there."""

    tokens: tuple[int, ...]
    build_s: float


class Exam(NamedTuple):
    """The text around the sources and the question, as the arena fixes it for a subset."""

    system_prompt: str
    pre_ctx: str
    mid_q: str
    tail: str
    max_new_tokens: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Exam:
        """The exam of what the arena hands to a method."""
        return cls(*(config["exam"][name] for name in cls._fields))


class Receiver:
    """A model with a store of caches behind the exam's prefix. Methods on the same exam share it.

    Args:
        decoder: the model.
        exam: the text around the sources.
        calibration: texts that the surrogate context and the KV corrections come from; without any there are none.
        store_gib: the most that the caches take.

    """

    def __init__(self, decoder: Decoder, exam: Exam, calibration: Sequence[str], store_gib: float) -> None:
        self.decoder = decoder
        self.exam = exam
        self.template = self._template("{question}")
        self.blender = Blender(decoder, open_store("memory:", budget_bytes=int(store_gib * 2**30)))
        chunks = [tuple(self.template.encode(text)) for text in calibration]
        if chunks:
            with_surrogate(self._library(), chunks, CorpusConfig.surrogate_tokens)
            self.blender.calibrate(self.template.prefix, chunks)

    def build(self, text: str) -> Source:
        """Compute a source's caches, without the question. Raises `ConfigError` for an empty source."""
        tokens = tuple(self.template.encode(text))
        if not tokens:
            raise ConfigError("a source is empty: the arena's data has none, so check the question set")
        library = self._library()
        begin = time.perf_counter()
        missing = library.missing([tokens])
        library.compute(missing)
        return Source(tokens, time.perf_counter() - begin if missing else 0.0)

    def layout(self, question: str, sources: Sequence[Source]) -> PromptLayout:
        """The prompt. Its question stands as it is, blanks around it included."""
        words = question.strip()
        start = question.index(words)
        template = self._template(f"{question[:start]}{{question}}{question[start + len(words) :]}")
        layout = template.layout_of_ids(words, [source.tokens for source in sources])
        self.decoder.check_length(layout.rows + self.exam.max_new_tokens)
        return layout

    def prefill(self, layout: PromptLayout, config: BlendConfig | None) -> FullPrefill | Blend:
        """Prefill in full or blended. Raises `ConfigError` if the store no longer holds a source of the prompt."""
        if config is None:
            return full_prefill(self.decoder, layout)
        blend = self.blender.prefill(layout, config=config, room=self.exam.max_new_tokens)
        if not all(blend.hits) or blend.problems:
            raise ConfigError("the store is too small for the sources of one question: raise --store-gib")
        return blend

    def _template(self, question: str) -> PromptTemplate:
        text = f"{self.exam.mid_q}{question}{self.exam.tail}"
        around = PromptConfig(system=self.exam.system_prompt, instruction=self.exam.pre_ctx, question=text)
        return PromptTemplate(self.decoder.tokenizer, around)

    def _library(self) -> Any:
        return self.blender.library(self.template.prefix)


@lru_cache(maxsize=1)
def loaded(weights: str, dtype: str, threads: int) -> Decoder:
    """The model, which all methods of a run share."""
    torch.set_num_threads(threads)
    return Decoder.load(str(resolve_model(weights)), name=weights, dtype=dtype)


@lru_cache(maxsize=1)
def receiver(decoder: Decoder, exam: Exam, calibration: tuple[str, ...], store_gib: float) -> Receiver:
    """The receiver of an exam, which the methods of a run share."""
    return Receiver(decoder, exam, calibration, store_gib)


class Driver:
    """The three functions of the contract, for the arm that a subclass names."""

    arm: Arm
    contract: ModuleType

    def setup(self, model_id: str, config: Mapping[str, Any]) -> None:
        """Load the model once. config: the exam, and `method_cfg` of `bench_arena`."""
        weights = config.get("weights", model_id)
        decoder = loaded(weights, config.get("dtype", "auto"), config.get("threads", torch.get_num_threads()))
        calibration = tuple(config.get("calibration", ()))
        self.receiver = receiver(decoder, Exam.of(config), calibration, config.get("store_gib", 8.0))

    def build_cache(self, source_text: str) -> Source:
        """Encode a source alone. Arms without caches only tokenise it."""
        if self.arm.config is None:
            return Source(tuple(self.receiver.template.encode(source_text)), 0.0)
        return self.receiver.build(source_text)

    def answer(self, question: str, caches: Sequence[Source], config: Mapping[str, Any]) -> Any:
        """Answer from the sources' caches, and say what it took."""
        layout = self.receiver.layout(question, caches if self.arm.reads else ())
        prefilled = self.receiver.prefill(layout, self.arm.config)
        decoder = self.receiver.decoder
        text = generate(decoder, prefilled, layout.token_ids, max_new_tokens=self.receiver.exam.max_new_tokens).text
        payload = layout.context.length
        layers = len(decoder.layers)
        dense = payload * layers
        recomputed, read = (dense, dense_bytes(decoder, payload))
        aux: dict[str, Any] = {"payload_tokens": payload, "prompt_tokens": layout.rows}
        if isinstance(prefilled, Blend):
            recomputed, read = payload_layer_tokens(prefilled), prefilled.bytes_loaded
            aux |= {"notes": list(prefilled.notes), "build_s": sum(source.build_s for source in caches)}
            aux["question_layer_tokens"] = question_layer_tokens(prefilled, self.arm.config)
        return self.contract.AnswerResult(
            text=text,
            recomputed_layer_tokens=recomputed,
            dense_payload_layer_tokens=dense,
            kv_bytes=read,
            ttft_ms=1e3 * prefilled.ttft_s,
            aux=aux,
        )

    def teardown(self) -> None:
        """Let go of the receiver; the next method of the run takes it again."""
        del self.receiver


def payload_layer_tokens(blend: Blend) -> int:
    """Tokens of the sources that the prefill ran, summed over layers."""
    context = blend.layout.context
    rows = blend.selection.rows
    outside = int(((rows < context.start) | (rows >= context.stop)).sum())
    return sum(max(0, count - outside) for count in blend.selection.rows_per_layer)


def question_layer_tokens(blend: Blend, config: BlendConfig | None) -> int:
    """Tokens of the question that a selection ran over the caches, summed over layers."""
    from blend.select import make_selector
    from blend.select.base import scoring_layers

    if config is None:
        return 0
    query = make_selector(config.selector).needs(len(blend.decoder.layers)).query
    if query is None:
        return 0
    return len(blend.layout.suffix) * (scoring_layers(query.layers, blend.decoder.attending)[-1] + 1)


def dense_bytes(decoder: Decoder, tokens: int) -> int:
    """Bytes of the KV that full prefill keeps of so many tokens, in the model's own format."""
    config = decoder.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * tokens * len(decoder.layers) * heads * width * decoder.dtype.itemsize)


def register_all(contract: ModuleType) -> None:
    """Register every arm with the arena. Raises `ConfigError` if its contract is not the one that this adapter knows."""
    try:
        for arm in ARMS:
            body = {
                "arm": arm,
                "contract": contract,
                "track": frozenset({"re"}),
                "mechanism_class": arm.mechanism,
                "provenance": arm.provenance,
                "backend": "kvblend",
                "training_data": "none trained; KV corrections are fitted to texts that are not in the question set",
                "cost_notes": COSTS,
            }
            contract.register(arm.name)(type(arm.name, (Driver, contract.BaseRepairMethod), body))
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"this KVShareArena has another contract ({first_line(error)}): use its version 0.1"
        ) from None
