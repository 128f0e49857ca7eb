"""Ranges of options: one table of numbers, from which the command line, configurations and selectors read what is allowed."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from blend.errors import ConfigError
from blend.text import is_text, shown

MOST_ROWS = 1_000_000
MOST_LAYERS = 10_000
LAYER_BANDS = ("all", "middle", "upper")
LAYERS_IN_WORDS = f"{', '.join(LAYER_BANDS)}, or layers such as 4-9 or 3+7+12-15"
_LAYER_RUN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


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


def _written(number: float) -> str:
    return f"{number:f}" if 0 < number < 1 else f"{number:,.0f}"
