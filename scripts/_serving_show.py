"""What `scripts/bench_serve` prints: tables of its rows and, last, its goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _results import Row
from _serving_figures import Capacity, capacity, verdict
from _serving_parts import DECODE_GOAL, STALL_GOAL

OURS = "blend"
RATE_GOAL = 3.0


def seconds(value: float | None) -> str:
    """Short; a value that is missing never came."""
    if value is None:
        return "never"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def load_table(rows: Sequence[Row], slo: float) -> Iterator[str]:
    """Pooled rows of `load`."""
    head = ("TTFT p50", "p95", "p99", "per token", "gap p99", "answers/s", f"in {slo:g} s", "cached", "lost")
    yield f"{'rate':>6} {'server':<12}" + "".join(f"{name:>10}" for name in head)
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        times = [seconds(row["ttft_s"][name]) for name in ("p50", "p95", "p99")]
        times += [seconds(row["tpot_s"]["p50"]), seconds(row["gap_s"]["p99"])]
        cached = "" if row["cached_share"] is None else f"{row['cached_share']:.0%}"
        counts = [f"{row['completed_per_s']:.3g}", f"{row['within'][f'{slo:g}']:.3g}", cached]
        cells = [*times, *counts, f"{row['requests'] - row['completed']}/{row['requests']}"]
        yield f"{row['rate']:>6g} {row['server']:<12}" + "".join(f"{cell:>10}" for cell in cells)


def capacities(rows: Sequence[Row], slo: float) -> dict[str, Capacity]:
    """Of each server."""
    names = dict.fromkeys(row["server"] for row in rows)
    return {name: capacity([row for row in rows if row["server"] == name], slo) for name in names}


def rate_goals(rows: Sequence[Row], slos: Sequence[float]) -> Iterator[str]:
    """Requests a second of each server at the same p95 time to first token, and ours against the best of the others'."""
    for slo in slos:
        found = capacities(rows, slo)
        yield f"requests/s with p95 TTFT <= {slo:g} s: " + ", ".join(f"{name} {one}" for name, one in found.items())
        others = {name: one for name, one in found.items() if name != OURS}
        if OURS in found and others:
            yield f"  {verdict(found[OURS], others, RATE_GOAL)}"


def decode_table(rows: Sequence[Row]) -> Iterator[str]:
    """Tokens per second of answers that run together."""
    yield f"\n{'answers':>8} {'tokens/s':>10} {'plain step':>11} {'ratio':>6}   goal {DECODE_GOAL:g}"
    for row in rows:
        if row["tokens_per_s"] is None:
            yield f"{row['batch']:>8} {'never all at once: raise --decode-tokens':>10} {'; '.join(row['errors'])}"
            continue
        found = row["tokens_per_s"] / row["plain_per_s"]
        cells = f"{row['tokens_per_s']:>10.1f} {row['plain_per_s']:>11.1f} {found:>6.2f}"
        yield f"{row['batch']:>8} {cells}   {'PASS' if found >= DECODE_GOAL else 'FAIL'}"


def stall_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The longest gap of running answers while others are prefilled."""
    for row in rows:
        if "over" not in row:
            yield f"\nstall: the answers ended before others were prefilled; raise --decode-tokens. {'; '.join(row['errors'])}"
            continue
        times = (
            f"{seconds(row['longest_s'])}, {row['over']:.2f} times the median of {seconds(row['median_s'])} meanwhile"
        )
        alone = f"{row['over_alone']:.1f} times that of {seconds(row['alone_s'])} before"
        verdict = "PASS" if row["over"] <= STALL_GOAL else "FAIL"
        yield f"\nlongest gap of {row['answers']} answers while {row['prefills']} others are prefilled: {times}, {alone}"
        yield f"  goal {STALL_GOAL:g} times the median: {verdict}"
