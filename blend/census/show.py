"""Shows a census: tables for a terminal, a JSON document, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blend.census.causes import Cause
from blend.census.census import LEAD_OF_STRETCH, Census, Counts, ListedRequest, summed
from blend.census.matching import CLASSES
from blend.census.memory import BLOCK
from blend.census.rates import Rates
from blend.census.reading import ROLES, LogReader
from blend.eval.show import save_figure, table
from blend.limits import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group

WIDTH = 100
_SHOWN_SOURCES = 8
_SHOWN_NAME = 40  # last characters
_SHOWN_CAUSES = 3
_LISTED_SOURCES = 1000
_ROLE_WORDS = {"tools": "tools' descriptions", "tool": "tools' results"}
_COLORS = {"prefix": "#0072B2", "shifted": "#56B4E9", "near": "#E69F00", "new": "#BBBBBB"}


class Findings(NamedTuple):
    """A census and its circumstances. logs: in words. tokenizer: what counted the tokens. rates: None if unknown."""

    census: Census
    reader: LogReader
    logs: str
    tokenizer: str
    rates: Rates | None

    @property
    def title(self) -> str:
        """What was counted."""
        requests = _counted(self.census.requests, "request")
        return f"{self.logs}: {requests}, {int(self.census.total.sum()):,} tokens"

    def cost(self, way: str) -> float:
        """What a way of reuse takes, in seconds; in tokens without rates."""
        computed = self.census.ways[way]
        return self.rates.seconds(computed) if self.rates is not None else computed.rows

    @property
    def causes(self) -> list[Cause]:
        """The largest causes of misses."""
        return self.census.causes.largest[:_SHOWN_CAUSES]


def render(findings: Findings) -> Group:
    """All tables as one rich renderable."""
    from rich.console import Group
    from rich.text import Text

    census = findings.census
    roles = {_ROLE_WORDS.get(role, role): counts for role, counts in census.by_role.items()}
    roles["all"] = census.total
    tables = [
        _shares(findings.title, "role", roles),
        _shares("by turn", "turn", census.turns),
    ]
    if len(census.by_source) > 1:
        tables.append(_shares("by source", "source", _shown_sources(census)))
    tables.append(_ways(findings))
    lines = [Text(visible(line)) for line in _cause_lines(findings)]
    footnotes = [Text(visible(line), style="dim") for line in _footnotes(findings)]
    return Group(*tables, *lines, Text(), *footnotes)


def _shares(title: str, first: str, rows: Mapping[str, Counts]) -> Group:
    """A table of rows with their shares of each class, without empty rows."""
    cells = []
    for name, counts in rows.items():
        total = int(counts.sum())
        shares = [f"{count / max(1, total):.1%}" for count in counts.tolist()]
        if total:
            cells.append([name, f"{total:,}", *shares])
    return table(title, [first, "tokens", *CLASSES], cells)


def _shown_sources(census: Census) -> dict[str, Counts]:
    """The largest sources, and all others as one."""
    shown = {name[-_SHOWN_NAME:]: counts for name, counts in census.sources[:_SHOWN_SOURCES]}
    hidden = [counts for _, counts in census.sources[_SHOWN_SOURCES:]]
    shown[_counted(len(hidden), "other source")] = summed(hidden)
    return shown


def _ways(findings: Findings) -> Group:
    ways = findings.census.ways
    rates = findings.rates
    without = next(iter(ways))
    columns = ["what prefill computes", "tokens", "saved"]
    if rates is not None:
        columns = [*columns, "prefill", "saved"]
    rows = []
    for name, computed in ways.items():
        saved = 1 - computed.rows / max(1, ways[without].rows)
        row = [name, f"{computed.rows:,.0f}", f"{saved:.1%}"]
        if rates is not None:
            seconds = findings.cost(name)
            row += [f"{seconds:,.1f} s", f"{1 - seconds / findings.cost(without):.1%}"]
        rows.append(row)
    return table("what reuse would save", columns, rows)


def _cause_lines(findings: Findings) -> Iterator[str]:
    total = max(1, int(findings.census.total.sum()))
    yield "why exact prefixes miss known text" if findings.causes else "Exact prefixes miss no known text."
    for number, cause in enumerate(findings.causes, 1):
        requests = _counted(cause.requests, "request")
        yield f" {number}. {cause.name.words}: {cause.tokens:,} tokens ({cause.tokens / total:.1%}), {requests}"
        old = f"{cause.old} -> " if cause.old else ""
        yield f"    {cause.place}: {old}{cause.new}"
        yield f"    remedy: {cause.name.remedy}"


def _footnotes(findings: Findings) -> Iterator[str]:
    reader = findings.reader
    yield "prefix: as an earlier request began; shifted: known text elsewhere; near: what an edit changed"
    yield f"tokens: {findings.tokenizer}, without the chat template's own"
    if findings.rates is not None:
        yield f"seconds: {findings.rates.words}; reading caches is not counted"
    else:
        yield "seconds: name the model that serves with --model, or its prefill rate with --rate"
    if reader.skipped:
        lines = _counted(reader.skipped, "line")
        yield f"{lines} without a request left out: {'; '.join(reader.named)}"
    if reader.images:
        yield f"{_counted(reader.images, 'part')} of messages without text not counted (images and others)"
    if findings.census.memory.evicted:
        texts = _counted(findings.census.memory.evicted, "text")
        yield f"{texts} forgotten to stay within --memory; what repeats them counts as new"


def document(findings: Findings) -> dict[str, Any]:
    """All figures, for JSON."""
    census = findings.census
    rates = findings.rates
    reader = findings.reader
    ways = {
        name: {"rows": computed.rows, "seconds": rates.seconds(computed) if rates else None}
        for name, computed in census.ways.items()
    }
    return {
        "logs": findings.logs,
        "tokenizer": findings.tokenizer,
        "requests": census.requests,
        "tokens": _named(census.total),
        "by_role": {role: _named(census.by_role[role]) for role in ROLES},
        "by_turn": {words: _named(counts) for words, counts in census.turns.items()},
        "by_source": {name: _named(counts) for name, counts in census.sources[:_LISTED_SOURCES]},
        "ways": ways,
        "rates": rates._asdict() if rates is not None else None,
        "block_tokens": BLOCK,
        "lead_tokens": LEAD_OF_STRETCH,
        "causes": [_cause_document(cause) for cause in census.causes.largest],
        "skipped": {"lines": reader.skipped, "first": reader.named, "parts_without_text": reader.images},
        "first_requests": [_request_document(request) for request in census.listed],
    }


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _named(counts: Counts) -> dict[str, int]:
    return dict(zip(CLASSES, counts.tolist(), strict=True))


def _request_document(request: ListedRequest) -> dict[str, Any]:
    return {**request._asdict(), "tokens": dict(zip(CLASSES, request.tokens, strict=True))}


def _cause_document(cause: Cause) -> dict[str, Any]:
    return {
        "cause": cause.name.words,
        "remedy": cause.name.remedy,
        **cause.name._asdict(),
        "tokens": cause.tokens,
        "requests": cause.requests,
        "place": cause.place,
        "old": cause.old,
        "new": cause.new,
    }


def write_picture(findings: Findings, path: Path) -> None:
    """Draw the census to a file. Raises `ConfigError`."""
    save_figure(path, lambda: _draw(findings))


def _draw(findings: Findings) -> Figure:
    """Tokens by turn on the left, what each way of reuse computes on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    by_turn, ways = figure.subplots(1, 2, width_ratios=(1, 1))
    _draw_turns(by_turn, findings)
    _draw_ways(ways, findings)
    figure.suptitle(visible(findings.title), fontweight="bold", parse_math=False)
    for axes in (by_turn, ways):
        axes.spines[["top", "right"]].set_visible(False)
    lines = [f"{number}. {cause.name.words}" for number, cause in enumerate(findings.causes, 1)]
    words = visible("   ".join(lines))
    figure.supxlabel(words, fontsize=8, color="#555555", parse_math=False)
    return figure


def _draw_turns(axes: Axes, findings: Findings) -> None:
    rows = findings.census.turns
    labels = list(rows)
    counts = np.array([*rows.values()]) / 1000
    below = np.zeros(len(rows))
    for number, name in enumerate(CLASSES):
        heights = counts[:, number]
        axes.bar(labels, heights, bottom=below, label=name, color=_COLORS[name])
        below += heights
    axes.set_xlabel("turn of the conversation")
    axes.set_ylabel("thousands of tokens")
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.12))


def _draw_ways(axes: Axes, findings: Findings) -> None:
    names = [*findings.census.ways]
    has_rates = findings.rates is not None
    costs = [findings.cost(name) / (1 if has_rates else 1000) for name in names]
    places = range(len(names))
    labels = [name.replace(", and", ",\nand") for name in names]
    bars = axes.barh(places, costs, color=list(map(_bar_color, names)))
    axes.set_yticks(places, labels)
    axes.bar_label(bars, [f"{cost / max(costs[0], 1e-9):.0%}" for cost in costs], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, max(costs) * 1.15)
    axes.set_xlabel("seconds of prefill" if has_rates else "thousands of tokens that prefill computes")


def _bar_color(way: str) -> str:
    if "blending" in way:
        return "#009E73"
    return _COLORS["prefix"] if "exact" in way else _COLORS["new"]
