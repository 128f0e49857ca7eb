"""What `scripts/bench_vllm` prints and draws of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _results import Row
from _serving_picture import STYLES
from _vllm_bench import BLENDED, PLAIN

TTFT_GOAL, DECODE_GOAL = 3.0, 0.95
_TIMES = ("ttft_s", "tpot_s")


def _pairs(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[Row, Row]]:
    """Rows of the two servers about the same question, without those that failed or have no time to a text."""
    whole = [row for row in rows if not row.get("error") and all(row.get(key, 0) is not None for key in _TIMES)]
    held = {(row["server"], *(row[key] for key in keys)): row for row in whole}
    plain = {key[1:]: row for key, row in held.items() if key[0] == PLAIN}
    return [(row, held[BLENDED, *key]) for key, row in plain.items() if (BLENDED, *key) in held]


def first_table(rows: Sequence[Row]) -> Iterator[str]:
    """Medians of each length, and of the ratios of pairs."""
    if rows:
        head = ("tokens", "pairs", "TTFT vllm", "+ kvblend", "ratio", "goal", "a token", "+ kvblend", "ratio", "goal")
        yield _line(head)
    for context in sorted({row["context"] for row in rows}):
        pairs = _pairs([row for row in rows if row["context"] == context], ["question"])
        if pairs:
            cells = [f"{median(plain['prompt_tokens'] for plain, _ in pairs):,.0f}", len(pairs)]
            for name, scale, unit, goal in (("ttft_s", 1.0, "s", TTFT_GOAL), ("tpot_s", 1e3, "ms", DECODE_GOAL)):
                cells += [f"{scale * median(pair[i][name] for pair in pairs):.2f} {unit}" for i in (0, 1)]
                ratio = median(plain[name] / ours[name] for plain, ours in pairs)
                cells += [f"{ratio:.2f}", f"{'PASS' if ratio >= goal else 'FAIL'} {goal:g}"]
            yield _line(cells)


def together_line(rows: Sequence[Row]) -> Iterator[str]:
    """Answers that decode together."""
    pairs = [pair for pair in _pairs(rows, ["turn", "batch"]) if all(one["tokens_per_s"] for one in pair)]
    if pairs:
        plain, ours = (median(pair[i]["tokens_per_s"] for pair in pairs) for i in (0, 1))
        verdict = "PASS" if ours >= DECODE_GOAL * plain else "FAIL"
        yield f"{pairs[0][0]['batch']} answers together: {plain:.1f} tokens/s, with kvblend {ours:.1f}   {verdict}"


def generator_table(rows: Sequence[Row]) -> Iterator[str]:
    """What vLLM's load generator said."""
    yield "\nvllm bench serve"
    yield _line(("a second", "", "TTFT p50", "p95", "p99", "a token", "ended/s", "ended"))
    for row in sorted(rows, key=lambda row: float(row["rate"])):
        times = [f"{row['ttft_s'][name]:.1f} s" for name in ("p50", "p95", "p99")]
        ended = [f"{row['requests_per_s']:.3f}", f"{row['completed']}/{row['requests']}"]
        yield _line([f"{row['rate']:g}", row["server"], *times, f"{row['tpot_s']['p50'] * 1e3:.0f} ms", *ended])


def _line(cells: Sequence[object]) -> str:
    return "".join(f"{cell!s:>{16 if place == 1 and len(cells) == 8 else 11}}" for place, cell in enumerate(cells))


def draw(rows: Sequence[Row], held: Mapping[str, Any], file: Path) -> None:
    """Write the picture of the load generator's figures to a .png, .svg or .pdf file."""
    from matplotlib.figure import Figure

    given, figure = held["options"], Figure(figsize=(9.6, 4.2), layout="constrained")
    first, pace = figure.subplots(1, 2)
    for name, (colour, marker) in zip((BLENDED, PLAIN), STYLES, strict=False):
        mine = sorted((row for row in rows if row["server"] == name), key=lambda row: float(row["rate"]))
        rates = [row["rate"] for row in mine]
        for axes, key in ((first, "ttft_s"), (pace, "tpot_s")):
            axes.plot(rates, [row[key]["p95"] for row in mine], color=colour, marker=marker, label=f"{name}, p95")
            axes.plot(rates, [row[key]["p50"] for row in mine], color=colour, linestyle="--", label=f"{name}, p50")
    first.set(title="time to first token", ylabel="seconds")
    pace.set(title="time per token after the first", ylabel="seconds")
    for axes in (first, pace):
        axes.set_xlabel("requests offered per second")
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=0)
        axes.set_xticks(rates := sorted({row["rate"] for row in rows}), [f"{rate:g}" for rate in rates])
    first.legend(fontsize=8)
    model = "a tiny random model" if given["tiny"] else given["model"]
    figure.suptitle(
        f"vllm bench serve: {model}, {given['context_tokens'][0]:,} tokens of context, {given['ratio']:.0%} of the rows",
        fontsize=11,
    )
    cores = "one thread" if given["threads"] == 1 else f"{given['threads']} threads"
    foot = f"{held['machine']['cpu']}, {cores}, {given.get('dtype', 'float32')}, {given['prompts']} prompts a rate"
    figure.supxlabel(foot, fontsize=7.5, color="#555555")
    figure.savefig(file, dpi=130)
