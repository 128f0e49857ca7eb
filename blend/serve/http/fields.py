"""A request's body as JSON, and the fields of OpenAI's protocol that are known and not supported.

A field that cannot change an answer is left out. Every other one is refused by its name unless it holds what changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from blend.limits import shown
from blend.serve.http.errors import refuse

_NOTHING: tuple[Any, ...] = (None,)
IGNORED = (
    *("user", "safety_identifier", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    "parallel_tool_calls",
)
"""Fields for bookkeeping, caches and tools elsewhere: no answer depends on them, whatever they hold."""
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": _NOTHING,
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "prediction": _NOTHING,
    "presence_penalty": (None, 0),
    "reasoning_effort": (None, "none"),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),  # tools are refused themselves
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": _NOTHING,
}
"""Each with the values that ask for nothing."""
IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": _NOTHING,
    "function_call": _NOTHING,
    "name": _NOTHING,
    "refusal": _NOTHING,
    "tool_calls": (None, []),
    "tool_call_id": _NOTHING,
}
"""The same in a message: what clients send along with an earlier answer."""


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises `ApiError`."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error) if str(error).isascii() else "not UTF-8 text"
        raise refuse(f"the body is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise refuse("the body is not a JSON object", code="invalid_json")
    return body


def without(values: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], where: str = "") -> dict[str, Any]:
    """What is left of an object's fields when those that ask for nothing are gone. Raises `ApiError` for one that asks."""
    kept = {}
    for name, value in values.items():
        if name not in unsupported:
            kept[name] = value
        elif not any(_same(value, neutral) for neutral in unsupported[name]):
            found = f"{where}{name}"
            raise refuse(f"{found} = {shown(value)} is not supported; leave it out", found, "unsupported_parameter")
    return kept


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
