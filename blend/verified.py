"""The result of `blend verify` for a model on this machine, kept in kvblend's cache folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blend.files import cache_root, keep_value, read_values

if TYPE_CHECKING:
    from blend.config import StateMode
    from blend.model.row_decoder import RowDecoder

_FILE = "verified.json"
UNCHECKED = "the model has recurrent layers and did not pass `blend verify` on this machine"


def keep_result(decoder: RowDecoder, result: dict[str, Any]) -> None:
    """Keep a result: its "decision" is "kept" where the model may be blended, its "states" a `StateMode`."""
    keep_value(cache_root() / _FILE, _key(decoder), result)


def may_blend(decoder: RowDecoder) -> bool:
    """Whether this model's prompts may be blended by default.

    Models with recurrent layers must have passed: composing the states of chunks was published to lose half of the quality of
    some, and none such was measured with real weights here.
    """
    return not decoder.recurrent or _result(decoder).get("decision") == "kept"


def checked_states(decoder: RowDecoder) -> StateMode:
    """What the model's recurrent layers carry over stored chunks by default: what its check found best."""
    states: StateMode = _result(decoder).get("states", "composed")
    return states


def first_warning(decoder: RowDecoder) -> str:
    """A warning about a model that failed, or was never checked; "" otherwise.

    The second one comes once on a machine, but each time where prompts are not blended for it.
    """
    result = _result(decoder)
    if result.get("decision") == "broken":
        return f"{decoder.name} failed `blend verify`: use full prefill, or a ratio that it names"
    if not may_blend(decoder):
        return f"{decoder.name} has recurrent layers: prompts get full prefill until it passes: blend verify {decoder.name}"
    if result:
        return ""
    keep_result(decoder, {"warned": True})
    return f"{decoder.name} has not been checked yet: blend verify {decoder.name}"


def _result(decoder: RowDecoder) -> dict[str, Any]:
    result: dict[str, Any] = read_values(cache_root() / _FILE, dict).get(_key(decoder)) or {}
    return result


def _key(decoder: RowDecoder) -> str:
    return f"{decoder.fingerprint} {decoder.kept_as}"
