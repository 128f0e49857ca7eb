"""What is wrong with a body, in one line of the server's own: where, what, and what to send instead.

Pydantic's own lines speak of Python's types and of our classes, which no client knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from blend.serve.http import schemas
from blend.serve.http.errors import ApiError, refuse

EXAMPLES: Mapping[type[BaseModel], str] = {
    schemas.MessageBody: '{"role": "user", "content": "..."}',
    schemas.DocumentBody: '{"title": "...", "text": "..."}, a text, or {"id": "..."}',
    schemas.RetrieveBody: '{"top_k": 8}, or {} for as many chunks as usual',
    schemas.OwnBody: '{"retrieve": {"top_k": 8}}',
    schemas.StreamOptions: '{"include_usage": true}',
}
"""Of each object that may stand in a body."""
_OF_CLASS = {kind.__name__: example for kind, example in EXAMPLES.items()}

Context = Mapping[str, Any]
_WORDS: Mapping[str, Callable[[Context], str]] = {
    "bool_type": lambda _: "is neither true nor false; give one of them",
    "dict_type": lambda _: 'is no object; give texts under names, such as {"name": "text"}',
    "finite_number": lambda _: "is not finite; give a number",
    "float_type": lambda _: "is no number; give one, without quotes",
    "greater_than": lambda context: f"is too small; give more than {_number(context['gt'])}",
    "greater_than_equal": lambda context: f"is too small; give {_number(context['ge'])} or more",
    "int_type": lambda _: "is no whole number; give one, without quotes",
    "less_than": lambda context: f"is too large; give less than {_number(context['lt'])}",
    "less_than_equal": lambda context: f"is too large; give {_number(context['le'])} or less",
    "list_type": lambda _: "is no list; give one, as [...]",
    "literal_error": lambda context: f"is not supported; give {_choices(context['expected'])}",
    "model_type": lambda context: f"is no object; give one, such as {_OF_CLASS[context['class_name']]}",
    "string_too_long": lambda context: f"is longer than {_number(context['max_length'])} characters; shorten it",
    "string_too_short": lambda _: "is empty; give a text",
    "string_type": lambda _: 'is no text; give one, as "..."',
    "string_unicode": lambda _: "is not Unicode text; leave out what is none",
    "too_long": lambda context: f"has more than {_number(context['max_length'])} entries; leave some out",
    "too_short": lambda _: "is empty; give one entry at least",
    "value_error": lambda context: str(context["error"]),
}
"""What pydantic may find by its name for it; `value_error` is ours."""


def mistake(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, by its place in it."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        return refuse(f"unknown field {param}; leave it out", param, "unknown_parameter")
    if first["type"] == "missing":
        return refuse(f"{param} is missing", param, "missing_required_parameter")
    words = _WORDS.get(first["type"], _otherwise)(first.get("ctx", {}))
    separator = ": " if first["type"] == "value_error" else " "
    return refuse(f"{param}{separator}{words}", param)


def _otherwise(context: Context) -> str:
    return "cannot be taken as it is; leave it out, or see docs/serving.md"


def _place(location: tuple[int | str, ...]) -> str:
    """messages[0].content: as a path, at most as long as a line."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    text = "".join(parts).removeprefix(".")
    return text if len(text) <= 100 else f"{text[:100]}..."


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _choices(expected: str) -> str:
    """As JSON has them."""
    return expected.replace("'", '"').replace("False", "false")
