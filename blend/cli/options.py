"""Types of options and arguments, and options that several commands share.

Every default comes from the configuration classes. Values are checked while the command line is parsed, if no model is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from blend.cli.console import read_text
from blend.config import DEFAULT_MODEL, DEFAULT_STORE, BlendConfig, CorpusConfig, MaskMode, PromptConfig
from blend.errors import ConfigError
from blend.model.engines import ENGINES, TRANSFORMERS
from blend.ranges import NUMBERS
from blend.select import make_selector
from blend.serve.limits import KV_BUDGET, LEARN_BUDGET, MEMORY_BUDGET, MOST_RUNNING, MOST_WAITING, PREFIX_BUDGET
from blend.store import codec_names
from blend.store.addresses import is_address, replica_of
from blend.text import check_corpus_name, is_text, shown
from blend_retrieval.embedders.base import MINILM_FLOOR

Option = Callable[[Any], Any]  # a decorator of a command
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """An option's value as `parse` returns it; its `ConfigError` is the user's mistake. name: of the value in the help."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The parsed value."""
        try:
            return self._parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def _text(value: str) -> str:
    """UTF-8 text in any locale. Python passes bytes outside the locale's encoding as surrogates."""
    try:
        return value if is_text(value) else os.fsencode(value).decode("utf-8")
    except UnicodeError:
        raise ConfigError(f"{shown(value)} is not UTF-8 text") from None


def _name(value: str) -> str:
    if not value.strip():
        raise ConfigError("the name is empty")
    return _text(value)


def _corpus_name(value: str) -> str:
    check_corpus_name(_name(value))
    return value


def _selector(value: str) -> str:
    """The spec without parameters at their defaults."""
    try:
        return make_selector(_text(value)).spec
    except ConfigError as error:
        raise ConfigError(f"{error}; `blend selectors` lists all") from None


def _device(value: str) -> str:
    if not _DEVICE.fullmatch(_text(value)):
        raise ConfigError(f"{shown(value)} is none of auto, cpu, cuda or cuda:N")
    return value


def _path(value: str | Path) -> Path:
    """A path of any bytes, in which ~ is the home directory, since an environment variable may hold one."""
    if not str(value):
        raise ConfigError("the path is empty")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(f"{shown(value)}: no such user") from None


def _output(value: str) -> Path:
    if value == "-":
        raise ConfigError("this goes to a file, not to standard output; name one")
    return _path(value)


def _file_text(value: str) -> str:
    """The text of a file, read while the command line is parsed."""
    text = read_text(Path(value), ConfigError)
    if not text.strip():
        raise ConfigError(f"{value} is empty; give a paragraph or more")
    return text


TEXT = Parsed("text", _text)
NAME = Parsed("text", _name)
PLACE = Parsed("path", _path)
FOLDER = Parsed("directory", _path)
OUTPUT = Parsed("file", _output)


def number(name: str, words: str, default: float | None = None, **attributes: Any) -> Option:
    """An option with the limits that `blend.ranges` has for `name`, which its help shows."""
    limits = NUMBERS[name]
    kind = Parsed("integer" if limits.whole else "float", limits.parsed)
    if default is not None:
        attributes |= {"default": default, "show_default": True}
    return click.option(_flag(name), name, type=kind, help=f"{words}  [{limits.span}]", **attributes)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _together(*options: Option) -> Option:
    """Several options as one decorator."""

    def apply(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def _shared(name: str, *field: str, **attributes: Any) -> Option:
    """An option that the environment can set too, as KVBLEND_<NAME>. field: its name in commands."""
    variable = f"KVBLEND_{name.removeprefix('--').replace('-', '_').upper()}"
    attributes = {"default": None, "show_default": True, **attributes}
    return click.option(name, *field, envvar=variable, show_envvar=True, **attributes)


_DEFAULTS = {**vars(CorpusConfig()), **vars(BlendConfig()), **vars(PromptConfig())}


class Command(click.Command):
    """Shows options for research under a heading of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Both lists."""
        parameters = self.get_params(ctx)
        for heading, research in (("Options", False), ("Options for research", True)):
            shown = [parameter for parameter in parameters if isinstance(parameter, ResearchOption) is research]
            records = [record for parameter in shown if (record := parameter.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class ResearchOption(click.Option):
    """An option for studies of the method, which answers do not need."""


def _for_research(name: str, words: str, kind: Any, flag: str) -> Option:
    return click.option(
        flag, name, cls=ResearchOption, type=kind, default=_DEFAULTS[name], show_default=True, help=words
    )


def _field(name: str, words: str, kind: Any = None, *flags: str) -> Option:
    """An option named like a field of a configuration, with its default; a number has the field's limits."""
    if name in NUMBERS:
        return number(name, words, _DEFAULTS[name])
    default = _DEFAULTS[name]
    return click.option(*(flags or (_flag(name),)), name, type=kind, default=default, show_default=True, help=words)


def _several(name: str, words: str, kind: Any) -> Option:
    """`_field` for an option that may be given several times; the command gets a tuple, under the plural."""
    default = _DEFAULTS[name]
    help_words = f"{words} May be given several times: all are compared in one table."
    return click.option(
        _flag(name),
        f"{name}s",
        type=kind,
        multiple=True,
        default=(default,),
        show_default=str(default),
        help=help_words,
    )


def _replica(ctx: click.Context, option: click.Parameter, value: Path | str) -> Path:
    """The store's directory; that of a shared store is a replica, which is not filled yet."""
    cache = ctx.params.pop("store_cache", None)
    hot = ctx.params.pop("store_hot", None)
    if isinstance(value, Path):
        if cache is not None or hot is not None:
            raise click.BadParameter(
                f"--store-cache and --store-hot are for a store at an address such as s3://bucket/name, not for {value}"
            )
        return value
    try:
        return replica_of(value, cache, hot)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, option) from None


# --store, --store-cache and --store-hot, as one directory
store_option = _together(
    _shared(
        "--store",
        type=Parsed("path", lambda value: value if is_address(value) else _path(value)),
        default=Path(DEFAULT_STORE),
        callback=_replica,
        help="Directory of chunk caches and index, or the address of a shared one: s3://bucket/name, gs://, az://, redis://, "
        "file://.",
    ),
    _shared(
        "--store-cache",
        type=FOLDER,
        is_eager=True,
        help="Directory that keeps what is read from a store at an address.  [default: one in ~/.cache/kvblend]",
    ),
    _shared(
        "--store-hot", type=TEXT, is_eager=True, help="Redis in front of a store at an address: redis://host:port/db."
    ),
)
store_key_option = _shared(
    "--store-key",
    type=PLACE,
    help="File with a secret of 16 bytes or more that seals the store's entries; others' are then not used.",
)
store_and_key = _together(store_option, store_key_option)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
json_file = click.option(
    "--json",
    "json_path",
    type=Parsed("file", _path),
    help="Write all figures as JSON; - is standard output, and the tables then go to standard error.",
)
_model_option = _shared(
    "--model",
    type=NAME,
    show_default=f"the one that made the store's caches, or {DEFAULT_MODEL}",
    help="Catalog name, HuggingFace id or model directory.",
)
_corpus_option = _shared(
    "--corpus",
    "name",
    type=Parsed("text", _corpus_name),
    show_default=False,
    help="Name of one of the store's corpora, each with its own index.  [default: the one without a name]",
)
computing = _together(
    _shared("--device", type=Parsed("text", _device), default="auto", help="auto, cpu, cuda or cuda:N."),
    _shared(
        "--dtype",
        type=click.Choice(("auto", "float32", "bfloat16", "float16")),
        default="auto",
        help="What the model computes in. auto: bfloat16 on a GPU; on a CPU the faster of float32 and bfloat16, measured once.",
    ),
    _shared(
        "--weights",
        type=click.Choice(("native", "int8")),
        default="native",
        help="int8: weights and activations of 8 bits in all linear layers, faster on CPUs with VNNI.",
    ),
    _shared(
        "--device-path",
        type=click.Choice(("auto", "eager")),
        default="auto",
        help="auto: kernels and CUDA graphs that prove themselves on this GPU; eager: without them.",
    ),
)
model_engine = _together(
    _shared(
        "--engine",
        type=click.Choice((*ENGINES, "vllm")),
        default=TRANSFORMERS,
        help="Who computes. llamacpp: a GGUF file, as --model, in llama.cpp. vllm: for `blend precompute` alone, quantised "
        "models included, for kvblend inside vLLM.",
    ),
    _shared(
        "--engine-options",
        type=TEXT,
        default="",
        metavar="JSON",
        help='Options of llama.cpp, such as {"tokens": 16384, "threads": 4, "cache_type": "q8_0"}, or vLLM\'s engine '
        'arguments, as the server gets them: {"quantization": "fp8"}.',
    ),
)
_keeping = _together(
    computing,
    model_engine,
    _field("codec", "How caches are kept.", click.Choice(codec_names())),
    number(
        "store_budget", "Most GB of chunk caches; the least recently used ones go.  [default: no limit]", metavar="GB"
    ),
)
common = _together(_model_option, store_and_key, _corpus_option, _keeping)

_promising = _together(
    _field(
        "quality",
        "Mean KL to full recompute that answers may have, in nats a token: recompute as many rows as each prompt needs. Needs "
        "`blend precompute --questions`; otherwise --ratio holds.",
    ),
    _field("flips", "Share of answers that may differ from full recompute's in their first 32 tokens; as --quality."),
    _for_research(
        "mask",
        "What a row sees: up to its position, or as published systems do.",
        click.Choice(get_args(MaskMode)),
        "--mask",
    ),
    _for_research(
        "correction",
        "Apply the KV correction that precompute measured to stored chunks.",
        None,
        "--correction/--no-correction",
    ),
    _for_research(
        "surrogate",
        "Use caches that were computed behind a surrogate context for other chunks.",
        None,
        "--surrogate/--no-surrogate",
    ),
)
reproducible = click.option(
    "--reproducible",
    is_flag=True,
    help="The same prompt gives the same answer, whatever was asked before: nothing that a prompt computed is kept.",
)
_SELECTOR_WORDS = "Who chooses the rows to recompute; see `blend selectors`."
_RATIO_WORDS = "Share of context rows to recompute."
blending = _together(
    _field("selector", _SELECTOR_WORDS, Parsed("spec", _selector)), _field("ratio", _RATIO_WORDS), _promising
)
# Several ways to blend, which are compared
comparing = _together(
    _several("selector", _SELECTOR_WORDS, Parsed("spec", _selector)),
    _several("ratio", f"{_RATIO_WORDS}  [{NUMBERS['ratio'].span}]", Parsed("float", NUMBERS["ratio"].parsed)),
    _promising,
)

# Which caches a corpus has
dividing = _together(
    _field("chunk_tokens", "Longest chunk, in tokens of the model."),
    _field(
        "surrogate_tokens",
        "Compute a second cache of every chunk, behind so many tokens of other chunks; 0: none, which halves time and store at "
        "more error.",
    ),
    click.option(
        "--surrogate-text",
        type=Parsed("path", _file_text),
        help="File to take those tokens from; every user of the corpus must be allowed to read it.  [default: the corpus]",
    ),
)


def _embedder(default: str) -> Option:
    words = "minilm, a sentence-transformers id, a directory, or words, which needs no model."
    return click.option("--embedder", type=NAME, show_default=default, help=words)


_BY_INDEX = "the one that made the index"
# Of a corpus that is being made
chunking = _together(dividing, _embedder(f"{_BY_INDEX}, or {_DEFAULTS['embedder']}; words where that cannot be had"))

# Of a corpus that is there
retrieval = _together(
    _field("top_k", "Chunks to retrieve."),
    _field(
        "reranker",
        "Cross-encoder that orders the chunks found anew: a HuggingFace id or a folder.  [default: none]",
        NAME,
    ),
    _field(
        "min_score",
        "Least similarity to the question of a chunk that is retrieved; 0: any.  "
        f"[default: {MINILM_FLOOR} with minilm, one common word with words, else any]",
    ),
    _embedder(_BY_INDEX),
)

# Of the engine behind a server
engine = _together(
    click.option("--no-learn", is_flag=True, help="Keep no caches of long passages that came with questions."),
    number("learn_budget", "Most GB of caches of learned text, for each key.", LEARN_BUDGET / 1e9, metavar="GB"),
    number("most_running", "Answers that are computed at the same time.", MOST_RUNNING),
    number("most_waiting", "Prompts that may wait; more are refused.", MOST_WAITING),
    number("kv_budget", "Memory for the prompts that run.", KV_BUDGET / 1e9, metavar="GB"),
    number("prefix_budget", "Memory for how earlier prompts began.", PREFIX_BUDGET / 1e9, metavar="GB"),
    number(
        "memory_budget",
        "Memory for the chunk caches that are used most; 0 keeps none.",
        MEMORY_BUDGET / 1e9,
        metavar="GB",
    ),
    number(
        "gpu_budget",
        "GPU memory for those of them that were used last; 0 keeps none.  [default: 30 % of what the model leaves]",
        metavar="GB",
    ),
)

# For a server: all but --corpus
all_corpora = _together(
    _model_option,
    store_and_key,
    _keeping,
    dividing,
    retrieval,
    _field(
        "chat_instructions", 'Instructions to the model in front of documents; "" for nothing.', TEXT, "--instructions"
    ),
)
