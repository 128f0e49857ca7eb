"""The ranges of all options, for the configuration classes and the command line; names and addresses; untrusted values shown.

The upper bounds are far beyond any model and machine; they keep a typing error from taking all memory or time.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from blend.errors import ConfigError

MOST_ROWS = 1_000_000
MOST_LAYERS = 10_000
LAYER_BANDS = ("all", "middle", "upper")
LAYERS_IN_WORDS = f"{', '.join(LAYER_BANDS)}, or layers such as 4-9 or 3+7+12-15"
_LAYER_RUN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_LONGEST_SHOWN = 40
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?/?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}  # which browsers leave out
_CORPUS_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # no capitals: on some file systems a and A are one folder


class Limits(NamedTuple):
    """The numbers from `low` to `high`, both included. whole: integers only. zero: 0 is allowed too, and means off."""

    low: float
    high: float
    whole: bool = True
    zero: bool = False

    def hold(self, value: object) -> bool:
        """Whether a value is a number within them; NaN, infinity and booleans never are."""
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number = cast(float, value)
        return self.low <= number <= self.high or (self.zero and number == 0)

    @property
    def span(self) -> str:
        """The range in words: 1 to 1,000,000."""
        return f"{'0, or ' if self.zero else ''}{_written(self.low)} to {_written(self.high)}"

    def parsed(self, text: str) -> int | float:
        """The number that a text is, as Python reads it. Raises `ConfigError` for another text or a number out of the range."""
        try:
            number: int | float = int(text) if self.whole else float(text)
        except (ValueError, OverflowError):
            raise ConfigError(self.refusal(text)) from None
        if not self.hold(number):
            raise ConfigError(self.refusal(number))
        return number

    def refusal(self, value: object) -> str:
        """Why a value is refused, and what is accepted."""
        kind = "a whole number" if self.whole else "a number"
        return f"{shown(value)} is not {'0 or ' if self.zero else ''}{kind} from {_written(self.low)} to {_written(self.high)}"


_ROWS = Limits(1, MOST_ROWS)
_SHARE = Limits(0, 1, whole=False)

NUMBERS = {
    "ratio": _SHARE,
    "quality": Limits(1e-6, 100, whole=False),
    "flips": Limits(1e-6, 1, whole=False),
    # Parameters of selectors.
    "check_layer": Limits(1, MOST_LAYERS - 1),  # layer 0's KV never deviates
    "k": _ROWS,
    "lead": Limits(0, MOST_ROWS),
    "seed": Limits(0, 2**32 - 1),
    "first": Limits(1, 2, whole=False),
    "layer": Limits(0, MOST_LAYERS - 1),  # where a selector chooses
    "factor": Limits(0, 1000, whole=False),  # how many budgets of rows it keeps there
    # How a corpus is made and asked.
    "chunk_tokens": Limits(16, MOST_ROWS),  # shorter chunks hold no sentence
    "surrogate_tokens": Limits(0, MOST_ROWS),
    "batch_tokens": _ROWS,
    "top_k": Limits(1, 10_000),
    "min_score": _SHARE,
    "max_new_tokens": _ROWS,
    # What only the command line has.
    "store_budget": Limits(1e-6, 1e6, whole=False),
    "older_than": Limits(0, 100_000, whole=False),
    "limit": Limits(1, 100_000),
    "repeats": Limits(1, 1000),
    "rate": Limits(1, 1e9, whole=False),
    "cache_tokens": Limits(16, 10**12),
    "memory": Limits(1e-6, 1e6, whole=False),
    "ray_workers": Limits(1, 10_000),
    "head": Limits(0, MOST_LAYERS - 1),
    # Of the server.
    "port": Limits(0, 65_535),
    "most_running": Limits(1, 1024),
    "most_waiting": Limits(1, 100_000),
    "audit": _SHARE,
    "kv_budget": Limits(1e-6, 1e6, whole=False),
    "prefix_budget": Limits(1e-6, 1e6, whole=False, zero=True),
    "held_budget": Limits(1e-6, 1e6, whole=False),
    "memory_budget": Limits(1e-6, 1e6, whole=False, zero=True),
    "gpu_budget": Limits(1e-6, 1e6, whole=False, zero=True),
    "learn_budget": Limits(1e-6, 1e6, whole=False),
    "body_budget": Limits(1e-6, 1e6, whole=False),
    "body_limit": Limits(1e-3, 100_000, whole=False),
    "upload_limit": Limits(1e-3, 100_000, whole=False),
    "grace": Limits(0, 86_400, whole=False),
}
"""Every option that is a number, by its name."""


def check_fields(config: Any) -> None:
    """Raise `ConfigError` for a field of a dataclass that is not what its annotation and its name allow.

    A number within `NUMBERS`, one of a `Literal`, text, yes or no, `layers` as `is_layers` has them, None where the
    annotation has it. Fields of other types are not checked.
    """
    kinds = _kinds(type(config))  # type: ignore[arg-type]  # mypy takes type[Any] for unhashable
    for field in fields(config):
        value = getattr(config, field.name)
        kind = kinds[field.name]
        if (value is None and NoneType in get_args(kind)) or not (problem := _refusal(field.name, value, kind)):
            continue
        raise ConfigError(f"{field.name}{problem}")


def check_number(name: str, value: object) -> None:
    """Raise `ConfigError` for a value that the option of this name cannot have."""
    if not NUMBERS[name].hold(value):
        raise ConfigError(f"{name}: {NUMBERS[name].refusal(value)}")


@cache  # reading annotations takes longer than everything else here
def _kinds(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)


def _refusal(name: str, value: object, kind: Any) -> str:
    """What is wrong with a field's value; empty if nothing is."""
    if name in NUMBERS:
        return "" if NUMBERS[name].hold(value) else f": {NUMBERS[name].refusal(value)}"
    if get_origin(kind) is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return ""
        return f" is {shown(value)}; choose one of {', '.join(get_args(kind))}"
    if kind not in (str, bool):
        return ""
    if not isinstance(value, kind):
        return f" is {shown(value)}; give a {kind.__name__}"
    if isinstance(value, str) and not is_text(value):
        return f" is {shown(value)}, which is not UTF-8 text"
    if name == "layers" and isinstance(value, str) and not is_layers(value):
        return f" is {shown(value)}; choose {LAYERS_IN_WORDS}"
    return ""


def is_text(value: str) -> bool:
    """Whether a string is free of surrogates, which no tokenizer takes: bytes that were not UTF-8 become such."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def is_layers(text: str) -> bool:
    """Whether a text names layers: one of `LAYER_BANDS`, or numbers and runs of them."""
    return text in LAYER_BANDS or bool(numbered_layers(text))


def numbered_layers(text: str) -> tuple[int, ...]:
    """Layers written as numbers and runs, such as "3+7+12-15", ascending and each once.

    Nothing where the text is something else, or names a layer beyond `MOST_LAYERS`: no text makes a longer tuple than that.
    """
    runs = []
    for part in text.split("+"):
        run = _LAYER_RUN.fullmatch(part)
        if run is None:
            return ()
        first = int(run[1])
        last = int(run[2] or run[1])
        if not first <= last < MOST_LAYERS:
            return ()
        runs.append((first, last))
    chosen: list[int] = []
    for first, last in sorted(runs):
        chosen.extend(range(max(first, chosen[-1] + 1 if chosen else 0), last + 1))
    return tuple(chosen)


def shown(value: object) -> str:
    """A value as Python writes it, cut to what fits a line."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _written(number: float) -> str:
    return f"{number:f}" if 0 < number < 1 else f"{number:,.0f}"


def is_corpus_name(name: str) -> bool:
    """Whether this can name a corpus."""
    return bool(_CORPUS_NAME.fullmatch(name))


def check_corpus_name(name: str) -> None:
    """Raise `ConfigError` for what cannot name a corpus. The empty name stands for the corpus without one."""
    if name and not is_corpus_name(name):
        raise ConfigError(
            f"{shown(name)} cannot name a corpus: use up to 64 lower-case letters, digits, dashes and underscores, "
            "a letter or digit first"
        )


# Controls beyond ASCII's first 32, line and paragraph separators, bidirectional embeddings, overrides and isolates
# (unicode.org/reports/tr9), and lone surrogates, which is how Python holds the bytes of a file name that is not UTF-8.
_BEYOND = "\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_OBEYED = re.compile(f"[\x00-\x1f{_BEYOND}]")
_BEYOND_JSON = re.compile(f"[{_BEYOND}]")


def visible(text: str, keep: str = "") -> str:
    r"""The text with control characters, except `keep`, written as Python escapes: \x1b, \n, \u202e."""
    return _OBEYED.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


def json_text(document: Any, **options: Any) -> str:
    r"""JSON in Unicode whose strings hold no control character as it is: \u001b, \u009b, \u202e.

    options: those of `json.dumps`. Surrogates are escaped too, so that the text can always be encoded.
    """
    text = json.dumps(document, ensure_ascii=False, **options)
    return _BEYOND_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def finite(value: Any) -> Any:
    """A value of JSON, in which every NaN and infinity is None."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counted(number: int, noun: str) -> str:
    """1 chunk, 2 chunks, 3,000 caches."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def is_loopback(host: str) -> bool:
    """Whether this name or address, without a port, is loopback on every machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def origin_of(url: str) -> str:
    """An origin as browsers write it: scheme, host, and the port unless it is the scheme's default.

    Raises `ConfigError` for anything else, such as a path or a wildcard.
    """
    origin = _ORIGIN.fullmatch(url.lower())
    if origin is None:
        raise ConfigError(f"{shown(url)} is no origin: give scheme and host alone, such as https://rag.example.org")
    scheme, host, port = origin.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")
