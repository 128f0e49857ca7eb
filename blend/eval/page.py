"""A report as one page that needs nothing else: tables, pictures, and the answers that changed, side by side.

Titles, questions and answers are anybody's text: all of it is escaped, and the page runs no script.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from blend.eval.output import write_whole
from blend.eval.picture import INK, panels_as_svg
from blend.eval.report import FULL, REUSE, ChangedAnswer, Measurement, Report
from blend.eval.show import SHOWN_CHANGES, TEXT_COLUMNS, Table, footnotes_of, kl_words, report_tables
from blend.text import counted, visible

_PLACEHOLDER = re.compile(r"@([A-Z]+)@")
_WORDS = re.compile(r"\s+|\S+")
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_SIZE = re.compile(r' (?:width|height)="[0-9.]+pt"')
_REFERENCES = re.compile(r'( id="|href="#|url\(#)')


def write_page(report: Report, path: Path) -> None:
    """Write the page, whole or not at all. Needs matplotlib. Raises `ConfigError` where `path` cannot be written."""
    write_whole(path, report_page(report).encode())


def report_page(report: Report) -> str:
    """The page's HTML."""
    parts = {"TITLE": _escaped(report.title), "BODY": "\n".join(_body(report))}
    template = files("blend.eval").joinpath("page.html").read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], template)


def _body(report: Report) -> Iterable[str]:
    (title, overview), *tables = report_tables(report).items()
    yield f"<h1>{_escaped(title)}</h1>"
    yield _table(overview)
    yield from (f"<p>{_escaped(f'{summary.method}: {summary.changes}')}</p>" for summary in report.methods[1:])
    yield from _panels(report)
    for title, table in tables:
        yield f"<h2>{_escaped(title)}</h2>{_table(table)}"
    yield from _changes(report)
    yield "<h2>How it was measured</h2>"
    yield from (f'<p class="soft">{_escaped(line)}</p>' for line in footnotes_of(report))


def _escaped(text: str) -> str:
    return html.escape(visible(text, keep="\n"))


def _table(table: Table) -> str:
    columns, rows = table
    kinds = [' class="name"' if column in TEXT_COLUMNS else "" for column in columns]
    head = "".join(f"<th{kind}>{_escaped(column)}</th>" for kind, column in zip(kinds, columns, strict=True))
    lines = "".join(f"<tr>{_cells(row, kinds)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cells(row: Sequence[str], kinds: Sequence[str]) -> str:
    cells = []
    for cell, kind in zip(row, kinds, strict=True):
        value, _, ends = _escaped(cell).partition("\n")
        interval = f"\n<small>{ends}</small>" if ends else ""
        cells.append(f"<td{kind}>{value}{interval}</td>")
    return "".join(cells)


def _panels(report: Report) -> Iterable[str]:
    yield '<div class="panels">'
    for place, (title, svg) in enumerate(panels_as_svg(report).items()):
        caption = _escaped(title)
        yield f'<figure role="img" aria-label="{caption}"><figcaption>{caption}</figcaption>{_inline(svg, place)}</figure>'
    yield "</div>"


def _inline(svg: str, place: int) -> str:
    """An SVG element for a page: as wide as its place, in the colours of the page, with ids that no other one has."""
    head, _, content = _METADATA.sub("", svg).replace(INK, "currentColor").partition(">")
    return _SIZE.sub("", head) + ">" + _REFERENCES.sub(rf"\g<1>panel{place}-", content)


def _changes(report: Report) -> Iterable[str]:
    """The records whose blended answers differ most, then all answers that changed."""
    yield f"<h2>Answers that differ most from {FULL}'s</h2>"
    records = dict.fromkeys(change.other.record_id for change in report.changed if change.other.method != REUSE)
    if not records:
        yield "<p>No answer of blended prefill differs.</p>"
    rows = {(row.record_id, row.method): row for row in report.measurements}
    for record in list(records)[:SHOWN_CHANGES]:
        yield _record(rows[record, FULL], [rows[record, summary.method] for summary in report.blends])
    if report.changed:
        yield f"<details><summary>All of them: {counted(len(report.changed), 'changed answer')}</summary>"
        yield from map(_change, report.changed)
        yield "</details>"


def _record(full: Measurement, blended: Sequence[Measurement]) -> str:
    """A record with full recompute's answer and all blended ones."""
    blocks = [_answer(FULL, _marked(full.answer, blended[0].answer) if len(blended) == 1 else _escaped(full.answer))]
    for method in blended:
        change = ChangedAnswer(full, method)
        is_changed = method.answer != full.answer
        figures = [kl_words(method.kl), change.meaning if is_changed else f"the same as {FULL}'s"]
        blocks.append(_answer(_listed(method.method, *figures), _marked(method.answer, full.answer)))
    return _article(full, full.record_id, blocks)


def _change(change: ChangedAnswer) -> str:
    """One changed answer beside full recompute's."""
    full, changed = change
    title = _listed(changed.record_id, changed.method, kl_words(changed.kl), change.meaning)
    blocks = [
        _answer(FULL, _marked(full.answer, changed.answer)),
        _answer(changed.method, _marked(changed.answer, full.answer)),
    ]
    return _article(full, title, blocks)


def _listed(*words: str) -> str:
    return " · ".join(filter(None, words))


def _article(full: Measurement, title: str, blocks: Sequence[str]) -> str:
    gold = f'<p class="soft">gold: <bdi>{_escaped(" | ".join(full.gold))}</bdi></p>' if full.gold else ""
    question = f'<p dir="auto">{_escaped(full.question)}</p>'
    return f'<article><h3>{_escaped(title)}</h3>{question}{gold}<div class="answers">{"".join(blocks)}</div></article>'


def _answer(title: str, marked: str) -> str:
    content = marked or '<span class="soft">(empty)</span>'
    return f'<div><div class="soft">{_escaped(title)}</div><div class="answer" dir="auto">{content}</div></div>'


def _marked(text: str, other: str) -> str:
    """A text, escaped, with a mark on the words between the beginning and the end that it shares with another one."""
    words = _WORDS.findall(text)
    other_words = _WORDS.findall(other)
    shortest = min(len(words), len(other_words))
    first = _shared(words, other_words, shortest)
    last = len(words) - _shared(words[::-1], other_words[::-1], shortest - first)
    middle = _escaped("".join(words[first:last]))
    mark = f"<mark>{middle}</mark>" if middle else ""
    return _escaped("".join(words[:first])) + mark + _escaped("".join(words[last:]))


def _shared(words: Sequence[str], other_words: Sequence[str], most: int) -> int:
    """How many words both begin with, at most so many."""
    differing = (place for place in range(most) if words[place] != other_words[place])
    return next(differing, most)
