"""Seconds of prefill: for each row, and for each pair of a row and an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blend.census.census import Computed

if TYPE_CHECKING:
    from blend.model.decoder import Decoder


class Rates(NamedTuple):
    """Seconds of a row and of a pair. words: where they come from."""

    row_s: float
    pair_s: float
    words: str

    def seconds(self, computed: Computed) -> float:
        """What computing this takes."""
        return computed.rows * self.row_s + computed.pairs * self.pair_s


def given_rate(tokens_per_s: float) -> Rates:
    """The same rate for prompts of any length."""
    return Rates(1 / tokens_per_s, 0.0, f"at {tokens_per_s:,.0f} tokens/s")


def measured_rates(decoder: Decoder) -> Rates:
    """Times full prefill, and estimates longer prompts as the server does: by their operations."""
    from blend.serve.engine.profile import PROFILED_ROWS, PrefillProfile

    profile = PrefillProfile(decoder)
    profile.measure()
    one_row, two_rows, sample = (profile.seconds(rows) or 0.0 for rows in (1, 2, PROFILED_ROWS))
    # One row has one pair, two rows have three.
    pair_s = two_rows - 2 * one_row
    words = f"measured here, {PROFILED_ROWS / sample:,.0f} tokens/s in a prompt of {PROFILED_ROWS}"
    return Rates(one_row - pair_s, pair_s, words)
