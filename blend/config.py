"""Options of a blended prefill. Every default of the command line is read from here, so that it exists once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from blend.errors import ConfigError
from blend.limits import LAYER_BANDS, LAYERS_IN_WORDS, check_fields, numbered_layers, shown

MaskMode = Literal["exact", "bottom-right"]
DeviationOf = Literal["v", "k", "kv"]
Norm = Literal["l2", "l1"]
Rule = Literal["product", "zsum"]
QueryRows = Literal["peak", "sum"]

DEFAULT_MODEL = "qwen2.5-coder-0.5b"
DEFAULT_EMBEDDER = "minilm"
DEFAULT_STORE = ".kvblend"
# Longest answers, in tokens: of a question, and of each of a report's, which are marked against short gold answers.
ANSWER_TOKENS, REPORT_TOKENS = 128, 32


@dataclass(frozen=True)
class BlendConfig:
    """How rows are chosen and computed. Raises `ConfigError` for what is out of its range (`blend.limits`).

    selector: name of a selector (`blend.select.SELECTORS`). ratio: share of the cached context rows to recompute, 0 to 1.
    mask: "exact" (row r sees keys up to its position) or "bottom-right" (up to r + N - M, as FlashAttention aligns it).
    check_layer, deviation_of, norm: where and how `hkvd` measures deviation. first_k: rows `first_k` takes per chunk at most.
    seed: of `random`. query_layers, query_rows, value_norm: where and how `query_guided` and `mixed` score the question's
    attention (`blend.recompute.query_attention`).
    rule, prefilter: see `mixed`. chunk_lead, chunk_floor, block: how the budget goes to rows by their scores
    (`blend.select.allotment`); chunk_lead None leaves it to the selector. correction: whether to add to stored chunks
    what the KV correction predicts, where the store holds one (`blend.chunks.correction`). surrogate: whether to use
    caches that were computed behind a surrogate context, where the store holds them (`blend.chunks.library`).
    """

    selector: str = "query_guided"
    ratio: float = 0.15
    mask: MaskMode = "exact"
    check_layer: int = 1
    deviation_of: DeviationOf = "v"
    norm: Norm = "l2"
    first_k: int | None = None
    seed: int = 0
    query_layers: str = "middle"
    query_rows: QueryRows = "peak"
    value_norm: bool = False
    chunk_lead: int | None = None
    rule: Rule = "product"
    prefilter: float = 0.0
    chunk_floor: float = 0.0
    block: int = 1
    correction: bool = True
    surrogate: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        _one_of("mask", self.mask, get_args(MaskMode))
        _one_of("deviation_of", self.deviation_of, get_args(DeviationOf))
        _one_of("norm", self.norm, get_args(Norm))
        _one_of("rule", self.rule, get_args(Rule))
        _one_of("query_rows", self.query_rows, get_args(QueryRows))
        if self.query_layers not in LAYER_BANDS and not numbered_layers(self.query_layers):
            raise ConfigError(f"query_layers is {shown(self.query_layers)}; choose {LAYERS_IN_WORDS}")


@dataclass(frozen=True)
class PromptConfig:
    """What stands around the chunks.

    system: the system message. instruction: what the user's turn opens with. question: how the question is put after the
    chunks; `{question}` is replaced.
    """

    system: str = "You are a careful assistant who answers from the given documents."
    instruction: str = "Answer the question using only the documents below. Be brief and exact.\n\n"
    question: str = "Question: {question}\nReply with the answer alone, in a few words."

    def __post_init__(self) -> None:
        check_fields(self)
        if "{question}" not in self.question:
            raise ConfigError("the question part of the prompt lacks the placeholder {question}")


@dataclass(frozen=True)
class CorpusConfig:
    """How documents become chunks and how many of them answer a question. Raises `ConfigError` as `BlendConfig` does.

    surrogate_tokens: every chunk's cache is also computed behind so many tokens of other chunks (`blend.chunks.library`);
    0 does not. surrogate_text: those tokens out of this text instead of chunks of the corpus; empty leaves what the store has.
    one_copy: keep that cache alone, for a prompt's first place too: half the store, more error.
    """

    chunk_tokens: int = 256
    top_k: int = 8
    embedder: str = DEFAULT_EMBEDDER
    codec: str = "bfloat16"
    batch_tokens: int = 1024
    surrogate_tokens: int = 512
    surrogate_text: str = ""
    one_copy: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {shown(value)}; choose one of {', '.join(choices)}")
