"""What `blend verify` found of a model on this machine, kept in kvblend's cache folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blend.files import cache_root, keep_value, read_values

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

_FILE = "verified.json"
UNVERIFIED = "the model has recurrent layers and did not pass `blend verify` on this machine"


def keep_decision(decoder: Decoder, about: dict[str, Any]) -> None:
    """Keep what was found: its "decision" is "kept" where the model may be blended."""
    keep_value(cache_root() / _FILE, _key(decoder), about)


def may_blend(decoder: Decoder) -> bool:
    """Whether this model's prompts may be blended by default.

    Models with recurrent layers must have passed: composing the states of chunks was published to lose half of the quality of
    some, and none such was measured with real weights here.
    """
    return not decoder.recurrent or _about(decoder).get("decision") == "kept"


def first_warning(decoder: Decoder) -> str:
    """A warning about a model that failed, or was never verified; "" otherwise.

    The second one comes once on a machine, but each time where prompts are not blended for it.
    """
    about = _about(decoder)
    if about.get("decision") == "broken":
        return f"{decoder.name} failed `blend verify`: use full prefill, or a ratio that it names"
    if not may_blend(decoder):
        return f"{decoder.name} has recurrent layers: prompts get full prefill until it passes: blend verify {decoder.name}"
    if about:
        return ""
    keep_decision(decoder, {"warned": True})
    return f"{decoder.name} has not been verified yet: blend verify {decoder.name}"


def _about(decoder: Decoder) -> dict[str, Any]:
    about: dict[str, Any] = read_values(cache_root() / _FILE, dict).get(_key(decoder)) or {}
    return about


def _key(decoder: Decoder) -> str:
    return f"{decoder.fingerprint} {decoder.kept_as}"
