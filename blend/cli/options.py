"""Types of options and arguments, and options that several commands share.

Every default comes from the configuration classes. Values are checked while the command line is parsed, if no model is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from blend.config import DEFAULT_MODEL, DEFAULT_STORE, BlendConfig, CorpusConfig, MaskMode, PromptConfig
from blend.errors import ConfigError
from blend.limits import NUMBERS, Limits, check_corpus_name, is_text, shown
from blend.select import make_selector
from blend.store import codec_names
from blend.store.addresses import is_address, replica_of

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A number within limits. Unlike click's ranges, it refuses NaN and says what is allowed."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.name = "integer" if limits.whole else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Parsed as Python does."""
        try:
            return self.limits.parsed(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class _Text(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """UTF-8 text in any locale. Python passes bytes outside the locale's encoding as surrogates."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it is."""
        try:
            return str(value) if is_text(value) else os.fsencode(value).decode("utf-8")
        except UnicodeError:
            self.fail(f"{shown(value)} is not UTF-8 text", param, ctx)


class _Name(_Text):
    """Text that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it is."""
        if not value.strip():
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


class _Selector(_Text):
    """A selector's spec, checked without a model."""

    name = "spec"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The spec without parameters at their defaults."""
        try:
            return make_selector(super().convert(value, param, ctx)).spec
        except ConfigError as error:
            self.fail(f"{error}; `blend selectors` lists all", param, ctx)


class _Place(click.Path):
    """A path of any bytes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Path`."""
        if not str(value):
            self.fail("the path is empty", param, ctx)
        if str(value) == "-" and not self.dir_okay and not self.allow_dash:
            self.fail("this goes to a file, not to standard output; name one", param, ctx)
        return super().convert(value, param, ctx)


class _HomePlace(_Place):
    """A path in which ~ is the home directory, since an environment variable may hold one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Path`."""
        place = super().convert(value, param, ctx)
        try:
            return place.expanduser()
        except RuntimeError:
            self.fail(f"{shown(value)}: no such user", param, ctx)


class _StorePlace(_HomePlace):
    """Such a path, or the address of a shared store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Path`, or the text of an address."""
        try:
            elsewhere = is_address(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return value if elsewhere else super().convert(value, param, ctx)


SELECTOR = _Selector()
TEXT = _Text()
NAME = _Name()
PLACE = _Place(path_type=Path)
STORE = _StorePlace(path_type=Path)
STORE_DIRECTORY = _HomePlace(path_type=Path, file_okay=False)
FOLDER = _Place(path_type=Path, file_okay=False)
OUTPUT = _Place(path_type=Path, dir_okay=False)
OUTPUT_OR_STDOUT = _Place(path_type=Path, dir_okay=False, allow_dash=True)


def number(flag: str, name: str, words: str, **attributes: Any) -> Callable[[F], F]:
    """An option with the limits that `blend.limits` has for `name`, which its help shows."""
    limits = NUMBERS[name]
    return click.option(flag, name, type=Number(limits), help=f"{words}  [{limits.span}]", **attributes)


_BLEND = BlendConfig()
_CORPUS = CorpusConfig()
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def _known_device(ctx: click.Context, option: click.Parameter, value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise click.BadParameter(f"{shown(value)} is none of auto, cpu, cuda or cuda:N", ctx, option)
    return value


def _corpus_name(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    try:
        check_corpus_name(value or "")
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, option) from None
    return value


def _text_of(ctx: click.Context, option: click.Parameter, value: Path | None) -> str | None:
    """The text of a file, read while the command line is parsed."""
    if value is None:
        return None
    try:
        text = value.read_text(encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{value} cannot be read ({error.strerror})", ctx, option) from None
    except UnicodeDecodeError:
        raise click.BadParameter(f"{value} is not UTF-8 text; convert it", ctx, option) from None
    if not text.strip():
        raise click.BadParameter(f"{value} is empty; give a paragraph or more", ctx, option)
    return text


def _shared(name: str, *field: str, **attributes: Any) -> Callable[[F], F]:
    """An option that the environment can set too, as KVBLEND_<NAME>. field: its name in commands."""
    variable = f"KVBLEND_{name.removeprefix('--').replace('-', '_').upper()}"
    return click.option(name, *field, envvar=variable, show_envvar=True, **{"show_default": True, **attributes})


def _field(source: BlendConfig | CorpusConfig, name: str, words: str, kind: Any) -> Callable[[F], F]:
    """An option named like a field of a configuration, with its default; a number has the field's limits."""
    flag, default = f"--{name.replace('_', '-')}", getattr(source, name)
    if name in NUMBERS:
        return number(flag, name, words, default=default, show_default=True)
    return click.option(flag, type=kind, default=default, show_default=True, help=words)


def _blending(name: str, words: str, kind: Any = None) -> Callable[[F], F]:
    return _field(_BLEND, name, words, kind)


def _corpus(name: str, words: str, kind: Any = None) -> Callable[[F], F]:
    return _field(_CORPUS, name, words, kind)


def _replica(ctx: click.Context, option: click.Parameter, value: Path | str) -> Path:
    """The store's directory; that of a shared store is a replica, which is not filled yet."""
    cache, hot = ctx.params.pop("store_cache", None), ctx.params.pop("store_hot", None)
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


_STORE_CACHE = _shared(
    "--store-cache",
    type=STORE_DIRECTORY,
    default=None,
    is_eager=True,
    help="Directory that keeps what is read from a store at an address.  [default: one in ~/.cache/kvblend]",
)
_STORE_HOT = _shared(
    "--store-hot",
    type=TEXT,
    default=None,
    is_eager=True,
    help="Redis in front of a store at an address: redis://host:port/db.",
)
_STORE = _shared(
    "--store",
    type=STORE,
    default=Path(DEFAULT_STORE),
    callback=_replica,
    help="Directory of chunk caches and index, or the address of a shared one: s3://bucket/name, gs://, az://, redis://, "
    "file://.",
)


def store_option(function: F) -> F:
    """--store, --store-cache, --store-hot, as one directory."""
    return _STORE(_STORE_CACHE(_STORE_HOT(function)))


def without_tiers(function: F) -> F:
    """Leave the tiers before a shared store out of the help of commands that are for study; they are taken all the same."""
    for parameter in vars(function)["__click_params__"]:
        if parameter.name in ("store_cache", "store_hot"):
            parameter.hidden = True
    return function


store_key_option = _shared(
    "--store-key",
    type=PLACE,
    default=None,
    help="File with a secret of 16 bytes or more that seals the store's entries; others' are then not used.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")

_CORPUS_NAME = _shared(
    "--corpus",
    "name",
    type=NAME,
    default=None,
    callback=_corpus_name,
    show_default=False,
    help="Name of one of the store's corpora, each with its own index.  [default: the one without a name]",
)
model_option = _shared(
    "--model",
    type=NAME,
    default=None,
    show_default=f"the one that made the store's caches, or {DEFAULT_MODEL}",
    help="Catalog name, HuggingFace id or model directory.",
)
device_option = _shared(
    "--device", type=TEXT, default="auto", callback=_known_device, help="auto, cpu, cuda or cuda:N."
)
dtype_option = _shared("--dtype", type=click.Choice(_DTYPES), default="auto", help="What the model computes in.")
_OF_A_STORE = (
    model_option,
    store_option,
    store_key_option,
    device_option,
    dtype_option,
    _corpus("codec", "How caches are kept.", click.Choice(codec_names())),
    number(
        "--store-budget",
        "store_budget",
        "Most GB of chunk caches; the least recently used ones go.  [default: no limit]",
        metavar="GB",
    ),
)
_COMMON = (*_OF_A_STORE[:3], _CORPUS_NAME, *_OF_A_STORE[3:])


def _switch(name: str, words: str) -> Callable[[F], F]:
    """An option of `BlendConfig` that is on or off."""
    flag = name.replace("_", "-")
    return click.option(f"--{flag}/--no-{flag}", default=getattr(_BLEND, name), show_default=True, help=words)


_BLENDING = (
    _blending("selector", "Who chooses the rows to recompute; see `blend selectors`.", SELECTOR),
    _blending("ratio", "Share of context rows to recompute."),
    _blending(
        "mask", "What a row sees: up to its position, or as published systems do.", click.Choice(get_args(MaskMode))
    ),
    _switch("correction", "Apply the KV correction that precompute measured to stored chunks."),
    _switch("surrogate", "Use caches that were computed behind a surrogate context for other chunks."),
)


_CHUNKING = (
    _corpus("chunk_tokens", "Longest chunk, in tokens of the model."),
    _corpus(
        "surrogate_tokens",
        "Compute a second cache of every chunk, behind so many tokens of other chunks; 0: none, which halves time and store at "
        "more error.",
    ),
    click.option(
        "--surrogate-text",
        type=PLACE,
        callback=_text_of,
        help="File to take those tokens from; every user of the corpus must be allowed to read it.  [default: the corpus]",
    ),
)
_TOP_K = _corpus("top_k", "Chunks to retrieve.")
_MIN_SCORE = _corpus("min_score", "Least similarity to the question of a chunk that is retrieved; 0: any.")
_INSTRUCTIONS = click.option(
    "--instructions",
    "chat_instructions",
    type=TEXT,
    default=PromptConfig.chat_instructions,
    show_default=True,
    help='Instructions to the model in front of documents; "" for nothing.',
)
_BY_INDEX = "the one that made the index"


def common(function: F) -> F:
    """--model, --store, --store-key, --corpus, --device, --dtype, --codec, --store-budget."""
    return _apply(_COMMON, function)


def all_corpora(function: F) -> F:
    """The same without --corpus; --chunk-tokens and so on, --top-k, --min-score, --embedder, --instructions."""
    return _apply(
        (*_OF_A_STORE, *_CHUNKING, _TOP_K, _MIN_SCORE, _embedder(show_default=_BY_INDEX), _INSTRUCTIONS), function
    )


def blending(function: F) -> F:
    """--selector, --ratio, --mask, --correction, --surrogate."""
    return _apply(_BLENDING, function)


def dividing(function: F) -> F:
    """--chunk-tokens, --surrogate-tokens, --surrogate-text: which caches a corpus has."""
    return _apply(_CHUNKING, function)


def chunking(function: F) -> F:
    """--chunk-tokens, --surrogate-tokens and --embedder, of a corpus that is being made."""
    return _apply((*_CHUNKING, _embedder(show_default=f"{_BY_INDEX}, or {_CORPUS.embedder}")), function)


def retrieval(function: F) -> F:
    """--top-k, --min-score and --embedder, of a corpus that is there."""
    return _apply((_TOP_K, _MIN_SCORE, _embedder(show_default=_BY_INDEX)), function)


def _embedder(**attributes: Any) -> Callable[[F], F]:
    return click.option(
        "--embedder", type=NAME, help="minilm, a sentence-transformers id or a directory.", **attributes
    )


def _apply(options: tuple[Callable[[Any], Any], ...], function: F) -> F:
    for option in reversed(options):
        function = option(function)
    return function
