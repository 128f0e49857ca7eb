"""Shows a census: tables for a terminal, and a JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.census.census import Census
from blend.census.matching import CLASSES
from blend.census.rates import Rates
from blend.census.reading import ROLES, LogReader
from blend.eval.show import table
from blend.limits import counted, visible

if TYPE_CHECKING:
    from rich.console import Group

_SHOWN_CAUSES = 3
_ROLE_WORDS = {"tools": "tools' descriptions", "tool": "tools' results"}


class Findings(NamedTuple):
    """A census and its circumstances. logs: in words. tokenizer: what counted the tokens. rates: None if unknown."""

    census: Census
    reader: LogReader
    logs: str
    tokenizer: str
    rates: Rates | None


def render(findings: Findings) -> Group:
    """All tables as one rich renderable."""
    from rich.console import Group
    from rich.text import Text

    causes = [Text(visible(line)) for line in _cause_lines(findings.census)]
    footnotes = [Text(visible(line), style="dim") for line in _footnotes(findings)]
    return Group(_shares(findings), _ways(findings), *causes, Text(), *footnotes)


def _shares(findings: Findings) -> Group:
    """The tokens of each role with the shares of each class, without empty rows."""
    census = findings.census
    total = census.by_role.sum(axis=0)
    roles = [_ROLE_WORDS.get(role, role) for role in ROLES]
    rows = []
    for role, counts in zip([*roles, "all"], [*census.by_role, total], strict=True):
        if tokens := int(counts.sum()):
            rows.append([role, f"{tokens:,}", *(f"{count / tokens:.1%}" for count in counts)])
    title = f"{findings.logs}: {counted(census.requests, 'request')}, {int(total.sum()):,} tokens"
    return table(title, ["role", "tokens", *CLASSES], rows)


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
        yield f"{counted(reader.skipped, 'line')} without a request left out: {'; '.join(reader.named)}"
    if forgotten := findings.census.memory.evicted:
        yield f"{counted(forgotten, 'text')} forgotten to stay within --memory; what repeats them counts as new"


def document(findings: Findings) -> dict[str, Any]:
    """All figures, for JSON."""
    census = findings.census
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
        "ways": ways,
        "rates": rates._asdict() if rates is not None else None,
        "causes": causes,
        "skipped": {"lines": findings.reader.skipped, "first": findings.reader.named},
        "first_requests": [{**request._asdict(), "tokens": _by_class(request.tokens)} for request in census.listed],
    }


def _by_class(counts: Any) -> dict[str, int]:
    return dict(zip(CLASSES, map(int, counts), strict=True))
