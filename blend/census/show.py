"""Shows a census: tables for a terminal, and a JSON document; `picture` draws it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blend.census.census import Census, Counts
from blend.census.matching import CLASSES
from blend.census.rates import Rates
from blend.census.reading import ROLES, LogReader
from blend.eval.show import table
from blend.text import counted, visible

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN_CAUSES = 3
_SHOWN_SOURCES = 8
_SHOWN_NAME = 40  # last characters of a source
_LISTED_SOURCES = 1000
_ROLE_WORDS = {"tools": "tools' descriptions", "tool": "tools' results"}


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
        requests = counted(self.census.requests, "request")
        return f"{self.logs}: {requests}, {int(self.census.by_role.sum()):,} tokens"


def render(findings: Findings) -> Group:
    """All tables as one rich renderable."""
    from rich.console import Group
    from rich.text import Text

    census = findings.census
    words = [_ROLE_WORDS.get(role, role) for role in ROLES]
    roles = dict(zip(words, census.by_role, strict=True)) | {"all": census.by_role.sum(axis=0)}
    tables = [_shares(findings.title, "role", roles), _shares("by turn", "turn", census.by_turn)]
    if len(census.by_source) > 1:
        tables.append(_shares("by source", "source", _largest_sources(census)))
    causes = [Text(visible(line)) for line in _cause_lines(census)]
    footnotes = [Text(visible(line), style="dim") for line in _footnotes(findings)]
    return Group(*tables, _ways(findings), *causes, Text(), *footnotes)


def _shares(title: str, first: str, rows: Mapping[str, Counts]) -> Group:
    """Tokens in rows, with the shares of each class, without empty rows."""
    cells = []
    for name, counts in rows.items():
        if tokens := int(counts.sum()):
            cells.append([name, f"{tokens:,}", *(f"{count / tokens:.1%}" for count in counts)])
    return table(title, [first, "tokens", *CLASSES], cells)


def _largest_sources(census: Census) -> dict[str, Counts]:
    """The largest sources, and all others as one."""
    by_size = _by_size(census)
    rows = {name[-_SHOWN_NAME:]: counts for name, counts in by_size[:_SHOWN_SOURCES]}
    smaller = [counts for _, counts in by_size[_SHOWN_SOURCES:]]
    if smaller:
        rows[counted(len(smaller), "other source")] = np.sum(smaller, axis=0)
    return rows


def _by_size(census: Census) -> list[tuple[str, Counts]]:
    return sorted(census.by_source.items(), key=lambda item: int(item[1].sum()), reverse=True)


def _ways(findings: Findings) -> Group:
    ways = findings.census.ways
    rates = findings.rates
    without = next(iter(ways.values()))
    columns = ["what prefill computes", "tokens", "saved"]
    if rates is not None:
        columns += ["prefill", "saved"]
    rows = []
    for name, computed in ways.items():
        row = [name, f"{computed.rows:,.0f}", f"{1 - computed.rows / without.rows:.1%}"]
        if rates is not None:
            seconds = rates.seconds(computed)
            row += [f"{seconds:,.1f} s", f"{1 - seconds / rates.seconds(without):.1%}"]
        rows.append(row)
    return table("what reuse would save", columns, rows)


def _cause_lines(census: Census) -> Iterator[str]:
    causes = census.causes.largest[:_SHOWN_CAUSES]
    yield "why exact prefixes miss known text" if causes else "Exact prefixes miss no known text."
    for number, cause in enumerate(causes, 1):
        share = f"{cause.tokens:,} tokens ({cause.tokens / census.by_role.sum():.1%})"
        yield f" {number}. {cause.name.words}: {share}, {counted(cause.requests, 'request')}"
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
        ending = "; ..." if reader.skipped > len(reader.named) else ""
        yield f"{counted(reader.skipped, 'line')} without a request left out: {'; '.join(reader.named)}{ending}"
    for reason in reader.unread:
        yield f"not read to its end: {reason}"
    if reader.images:
        yield f"{counted(reader.images, 'part')} of messages without text not counted (images and others)"
    if forgotten := findings.census.memory.evicted:
        yield f"{counted(forgotten, 'text')} forgotten to stay within --memory; what repeats them counts as new"


def document(findings: Findings) -> dict[str, Any]:
    """All figures, for JSON."""
    census = findings.census
    reader = findings.reader
    rates = findings.rates
    ways = {
        name: {"rows": computed.rows, "seconds": rates.seconds(computed) if rates else None}
        for name, computed in census.ways.items()
    }
    causes = []
    for cause in census.causes.largest:
        words = {"cause": cause.name.words, "remedy": cause.name.remedy, **cause.name._asdict()}
        causes.append({**words, **{name: value for name, value in vars(cause).items() if name != "name"}})
    return {
        "logs": findings.logs,
        "tokenizer": findings.tokenizer,
        "requests": census.requests,
        "tokens": _by_class(census.by_role.sum(axis=0)),
        "by_role": dict(zip(ROLES, map(_by_class, census.by_role), strict=True)),
        "by_turn": {words: _by_class(counts) for words, counts in census.by_turn.items() if counts.any()},
        "by_source": {name: _by_class(counts) for name, counts in _by_size(census)[:_LISTED_SOURCES]},
        "ways": ways,
        "rates": rates._asdict() if rates is not None else None,
        "causes": causes,
        "skipped": {"lines": reader.skipped, "first": reader.named, "parts_without_text": reader.images},
        "unread": reader.unread,
        "first_requests": [{**request._asdict(), "tokens": _by_class(request.tokens)} for request in census.listed],
    }


def _by_class(counts: Any) -> dict[str, int]:
    return dict(zip(CLASSES, map(int, counts), strict=True))
