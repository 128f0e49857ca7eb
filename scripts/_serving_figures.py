"""Figures out of samples: percentiles, rates, and how many requests a second a server takes within a time to first token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from _results import Row
from _serving_load import Sample

SHARES = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of the values that `percent` of them do not exceed; None without values, or where it is infinite.

    No interpolation: it is a value that was measured, and infinite ones may be among them.
    """
    if not values:
        return None
    found = float(np.percentile(values, percent, method="inverted_cdf"))
    return found if math.isfinite(found) else None


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Those of `SHARES` and the largest."""
    return {**{f"p{share}": percentile(values, share) for share in SHARES}, "max": percentile(values, 100)}


def summary(samples: Sequence[Sample], seconds: float, slos: Iterable[float]) -> Row:
    """The row of a load of `seconds`. A request without a first token counts as one whose first token never came.

    completed_per_s: answers that are whole, over the time until the last of them. within: requests per second that came to an
    end and whose first token came within so many seconds, for each of `slos`. hit_share: of the chunks,
    those that came out of the store; computed_share: of the rows; both where the server says so. late_s: how much too late a
    question was sent at most.
    """
    ends = [sample.done_s for sample in samples if sample.error is None and sample.done_s is not None]
    taken = max([seconds, *ends])
    first = [math.inf if sample.ttft_s is None else sample.ttft_s for sample in samples]
    whole = [sample for sample in samples if sample.error is None]
    return {
        "requests": len(samples),
        "completed": len(whole),
        "completed_per_s": len(whole) / taken,
        "ttft_s": percentiles(first),
        "tpot_s": percentiles([one.tpot_s for one in samples if one.tpot_s is not None]),
        "gap_s": percentiles([gap for one in samples for gap in one.gaps_s]),
        "within": {f"{slo:g}": sum(_in_time(one, slo) for one in whole) / taken for slo in slos},
        "tokens_per_s": sum(one.tokens for one in whole) / taken,
        "answer_tokens": mean([one.tokens for one in whole]),
        "prompt_tokens": mean([one.prompt_tokens for one in whole]),
        "cached_share": ratio(sum(one.cached_tokens for one in whole), sum(one.prompt_tokens for one in whole)),
        "hit_share": ratio(_total(whole, "hits"), _total(whole, "chunks")),
        "computed_share": ratio(_total(whole, "rows_computed"), _total(whole, "rows")),
        "late_s": max((one.late_s for one in samples), default=0.0),
        "errors": errors(samples),
    }


def _total(samples: Iterable[Sample], figure: str) -> float:
    return float(sum(sample.figures.get(figure, 0) for sample in samples))


def _in_time(sample: Sample, slo: float) -> bool:
    return sample.ttft_s is not None and sample.ttft_s <= slo


def errors(samples: Iterable[Sample]) -> dict[str, int]:
    """How often each, the digits of their messages apart from the status."""
    found: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            found[sample.error] = found.get(sample.error, 0) + 1
    return found


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic; None without values."""
    return fmean(values) if values else None


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to divide by."""
    return part / whole if whole else None


class Capacity(NamedTuple):
    """Requests per second at which the first token of 95 % comes in time.

    at_least: even the highest rate that was measured was taken in time. None: not even the lowest one was.
    """

    per_s: float | None
    at_least: bool = False

    def __str__(self) -> str:
        if self.per_s is None:
            return "none"
        return f"{'>= ' if self.at_least else ''}{self.per_s:.3g}"


def capacity(rows: Iterable[Mapping[str, Any]], slo: float) -> Capacity:
    """Of one server, from its rows at several rates.

    Between the last rate whose p95 is in time and the next one it is interpolated, straight in the logarithm of p95: that of a
    queue grows faster than straight. A next one without p95 gives the last one in time.
    """
    held = sorted(rows, key=lambda row: float(row["rate"]))
    inside: Mapping[str, Any] | None = None
    for row in held:
        late = row["ttft_s"]["p95"]
        if late is None or late > slo:
            return Capacity(_between(inside, row, slo))
        inside = row
    return Capacity(inside["rate"], at_least=True) if inside else Capacity(None)


def _between(inside: Mapping[str, Any] | None, outside: Mapping[str, Any], slo: float) -> float | None:
    if inside is None:
        return None
    low, high = inside["ttft_s"]["p95"], outside["ttft_s"]["p95"]
    if high is None or low <= 0:
        return float(inside["rate"])
    share = math.log(slo / low) / math.log(high / low)
    return float(inside["rate"] + share * (outside["rate"] - inside["rate"]))


def pooled(rows: Sequence[Row], slos: Sequence[float]) -> list[Row]:
    """Rows of several rounds as one row for each server and rate, over all of their samples."""
    keys = dict.fromkeys((row["server"], row["rate"]) for row in rows if "why_not" not in row)
    return [_pool(key, [row for row in rows if (row["server"], row["rate"]) == key], slos) for key in keys]


def _pool(key: tuple[str, float], rows: Sequence[Row], slos: Sequence[float]) -> Row:
    held = [row for row in rows if "why_not" not in row]
    samples = [Sample(**sample) for row in held for sample in row["samples"]]
    found = summary(samples, sum(row["seconds"] for row in held), slos)
    # Rounds follow one another, so their times add up; moments inside of a round do not say how long all of them took.
    found["completed_per_s"] = fmean(row["completed_per_s"] for row in held)
    found["within"] = {name: fmean(row["within"][name] for row in held) for name in held[0]["within"]}
    found["tokens_per_s"] = fmean(row["tokens_per_s"] for row in held)
    return {"server": key[0], "rate": key[1], "rounds": len(held), **found}


def verdict(ours: Capacity, others: Mapping[str, Capacity], goal: float) -> str:
    """Our capacity against the best of the others', in one line."""
    found = {name: one for name, one in others.items() if one.per_s is not None}
    if ours.per_s is None:
        return "not one of the rates was taken in time"
    if not found:
        return "the others took not one of the rates in time"
    best = max(found, key=lambda name: found[name].per_s or 0.0)
    times = ours.per_s / (found[best].per_s or math.inf)
    bound = "at least " if ours.at_least else "at most " if found[best].at_least else ""
    return f"{bound}{times:.2f} times {best}, goal {goal:g}: {'PASS' if times >= goal else 'FAIL'}"
