"""Selectors as text: `NAME`, or `NAME:key=value,key=value` with the fields of the selector's dataclass.

Numbers are written as Python does, yes and no as true and false, layers joined by a plus sign (`layers=3+7+12-15`), and what
the selector is to find itself as auto. What is at its default is left out.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from blend.errors import ConfigError
from blend.limits import LAYERS_IN_WORDS, NUMBERS, shown

if TYPE_CHECKING:
    from blend.select.base import Selector

AUTO = "auto"
_SWITCH = {"true": True, "false": False}

MEANINGS = {
    "layers": "layers at which the question's attention scores rows",
    "rows": "the peak of the attention over the question's rows, or the sum",
    "value_norm": "weight attention by the norm of the value it reads",
    "check_layer": "layer at which deviation is measured",
    "of": "deviation of values, of keys, or of both",
    "norm": "how deviation is measured",
    "rule": "how deviation and attention are joined: their product, or the sum of the z-scores of their logarithms",
    "prefilter": "rows that attention alone keeps before the check layer, in budgets; 0 keeps all",
    "k": "most rows a chunk; auto spends the whole budget",
    "seed": "seed of the random numbers",
    "lead": "rows at the start of every chunk that are taken first; auto is 6 for query_guided with single rows, else 0",
    "floor": "share of the budget that every chunk gets an equal part of",
    "block": "neighbouring rows that are taken together",
}
"""What every parameter means, by its name: it means the same in all selectors that have it."""


def parameters(kind: type) -> tuple[Field[Any], ...]:
    """The fields of a selector's class, its own before those that it shares."""
    return tuple(sorted(fields(kind), key=lambda field: field.kw_only is True)) if is_dataclass(kind) else ()


def allowed(kind: type, name: str) -> str:
    """What a parameter of a selector's class may be, in words."""
    annotation = get_type_hints(kind)[name]
    if name in NUMBERS:
        return NUMBERS[name].span
    if get_origin(annotation) is Literal:
        return ", ".join(get_args(annotation))
    return LAYERS_IN_WORDS if name == "layers" else ", ".join(_SWITCH)


def defaults(kind: type) -> str:
    """The parameters of a selector's class at their defaults, as a spec has them."""
    return ", ".join(f"{field.name}={written(field.default)}" for field in parameters(kind))


def summary(kind: type) -> str:
    """What a selector's class does, in one line."""
    return (kind.__doc__ or "").partition("\n")[0].rstrip(".")


def spec_of(selector: Selector) -> str:
    """Name and parameters of a selector; fields that are no text, number or switch are left out."""
    name = selector.name or type(selector).__name__
    values = [(field, getattr(selector, field.name)) for field in parameters(type(selector))]
    told = [
        f"{field.name}={written(value)}"
        for field, value in values
        if isinstance(value, str | Real | None) and (field.default is MISSING or value != field.default)
    ]
    return f"{name}:{','.join(told)}" if told else name


def written(value: object) -> str:
    """A value as a spec has it."""
    if value is None:
        return AUTO
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    return repr(float(value)).removesuffix(".0") if isinstance(value, Real) else str(value)


def parsed(kind: type, name: str, text: str) -> dict[str, Any]:
    """The arguments of a selector's class out of the part of a spec behind the colon. Raises `ConfigError` in one line."""
    known = {field.name: field for field in parameters(kind)}
    found: dict[str, Any] = {}
    for pair in text.split(","):
        key, sign, value = pair.partition("=")
        if not known:
            raise ConfigError(f"{name} takes no parameters; leave out {shown(':' + text)}")
        if not sign:
            joined = "; layers are joined by +" if "layers" in known else ""
            raise ConfigError(f"{name}: {shown(pair)} is not KEY=VALUE{joined}; it takes {', '.join(known)}")
        if key not in known:
            raise ConfigError(f"{name} has no parameter {shown(key)}; choose among {', '.join(known)}")
        if key in found:
            raise ConfigError(f"{name}: {key} is given twice")
        found[key] = _value(name, known[key], value)
    return found


def _value(name: str, field: Field[Any], text: str) -> Any:
    """One value; texts are checked by the class itself."""
    if text == AUTO and field.default is None:
        return None
    try:
        if field.name in NUMBERS:
            return NUMBERS[field.name].parsed(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {field.name}: {error}") from None
    if not isinstance(field.default, bool):
        return text
    if text not in _SWITCH:
        raise ConfigError(f"{name}: {field.name} is {shown(text)}; choose one of {', '.join(_SWITCH)}")
    return _SWITCH[text]
