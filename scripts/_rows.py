"""What a row of the TTFT benchmark says of a method, and the table that shows the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from _results import Row

if TYPE_CHECKING:
    from blend.blender import Blend

_STAGES = ("load", "reposition", "select", "recompute")


def about(blend: Blend) -> Row:
    """What a row says of one run, the time apart."""
    wrong = [] if bool(blend.logits.isfinite().all()) else ["logits are not finite"]
    wrong += [] if all(blend.hits) else ["chunks were missing"]
    wrong += [*blend.problems, *blend.artifact_problems]
    return {
        "rows_share": blend.rows_share,
        "bytes_loaded": blend.bytes_loaded,
        "stages": dict(blend.stages),
        "notes": list(blend.notes),
        "wrong": "; ".join(wrong) or None,
    }


def merged(rows: list[Row]) -> Row:
    """What several runs say: of stages the median, of the rest the last."""
    last = dict(rows[-1])
    if "stages" in last:
        last["stages"] = {name: median(row["stages"].get(name, 0.0) for row in rows) for name in last["stages"]}
    return last


def against(full: float | None, seconds: float, row: Mapping[str, Any], rate: float, layers: int) -> Row:
    """Speed-up over full prefill, and what is above the floor; nothing where full prefill has no time."""
    from blend.eval.evaluator import floor_seconds

    if full is None:
        return {"bandwidth": rate}
    floor = floor_seconds(row["rows_share"] * full, row["bytes_loaded"] / rate, layers)
    return {"bandwidth": rate, "speedup": full / seconds, "floor_s": floor, "over_floor": seconds / floor}


def table(rows: Iterable[Row]) -> list[str]:
    """Lines of a table; a row without a time says why."""
    head = f"{'shape':<10} {'tokens':>7} {'store':<10} {'method':<18} {'TTFT':>9} {'speed-up':>9} {'rows':>6}"
    stages = "".join(f" {name:>10}" for name in _STAGES)
    return [f"{head} {'floor':>9} {'x floor':>7}{stages} {'GPU peak':>9}", *map(_line, rows)]


def _line(row: Row) -> str:
    line = f"{row['shape']:<10} {row['tokens']:>7} {row['store'] or '-':<10} {row['method']:<18}"
    if "ttft_s" not in row:
        return f"{line} {row['why_not']}"
    speedup, share = _cell(row.get("speedup"), ">8.1f", "x", 9), _cell(row.get("rows_share"), ">6.1%", "", 6)
    line += f" {_ms(row['ttft_s'], 9)} {speedup} {share}"
    line += f" {_ms(row.get('floor_s'), 9)} {_cell(row.get('over_floor'), '>7.2f', '', 7)}"
    line += "".join(f" {_ms(row.get('stages', {}).get(name), 10)}" for name in _STAGES)
    peak = row["peak_bytes"]
    line += f" {_cell(peak and peak / 2**30, '>5.1f', ' GiB', 9)}"
    return "  ".join((line, *(row.get("notes") or ()), *([f"WRONG: {row['wrong']}"] if row.get("wrong") else ())))


def _ms(seconds: float | None, width: int) -> str:
    return _cell(None if seconds is None else 1e3 * seconds, f">{width - 3}.0f", " ms", width)


def _cell(value: float | None, form: str, unit: str, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{form}}{unit}"
