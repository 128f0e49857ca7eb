"""Finds the headings of a text, in Markdown or plain text.

Headings of plain text are underlined lines, and lines after a `#` where that marks headings. Tutorials, logs and notes
are full of comments and ruled tables, and titles go into prompts and sources. So a line counts only on good evidence: a
missed heading merely costs a shorter title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from unicodedata import east_asian_width

from blend_retrieval.document import MAX_HEADING, Heading, Markup, clean_title

if TYPE_CHECKING:
    from markdown_it import MarkdownIt


_KEYWORDS = (
    "assert async await begin break case catch cd class const continue def del do done echo elif else end esac except "
    "export fi for from function git global if import int lambda let ls make mkdir npm pass pip print raise return rm "
    "static sudo switch try var void while with yield"
)
_STATEMENTS = "ALTER CMD COPY CREATE DELETE DROP ENTRYPOINT ENV FROM INSERT RUN SELECT UPDATE WORKDIR"
_KEYWORD = re.compile(rf"(?:{_KEYWORDS.replace(' ', '|')})\b")
_STATEMENT = re.compile(rf"(?:{_STATEMENTS.replace(' ', '|')})\b")
PROMPT = re.compile(r">>>|\.\.\.(?: |$)|In ?\[\d*\]:|Out ?\[\d*\]:|[$%] ")
_CODE = re.compile(
    r"""[^\w\s]*[=<>|&;{}\[\]\\]                    # opens with signs
    | .*[;{}\[(=\\+&|]$                            # ends with signs
    | [\w.\[\]'", ]+?\s*(?:[-+*/%|&:]|//|\*\*)?=     # an assignment
    | [\w.]+\(.*[(),:]$                            # a call
    | -?\s*[\w."'-]+:(?:\s+\S+)?$                  # a key of YAML, alone or with one word
    | [a-z][\w.-]*\s(?:.*\s)?--?[A-Za-z]           # a command with an option
    | diff\s--git|@@\s|---\s|\+\+\+\s|[-+]\w        # a patch
    | [/.~]*/\w | //|/\*|@\w                       # a path, a comment, a decorator
    | .*(?:::|->|=>|==|!=|&&|\|\|)""",
    re.VERBOSE,
)
_LINK = re.compile(r"!?\[[^\]]*\]\(")
_ITEM = re.compile(r"(?:[-*+•]|\d+[.)]) +\S|```|~~~|> ?[^\s>]|\| ?\S|#{1,6} +\S")
_VERSION = re.compile(r"v?\d+(?:\.\d+){2,}(?:$|\W)")
_SIGNS = re.compile(r"[={}\[\];\\|<>\t]|  |[A-Za-z0-9_]\(|::|->|&&|\.\.")
_OPENING = "\"'“‘«(（《〈【「『*`_¿¡"
_CLOSING = ".,;:。，；：、…({[-/"


def like_heading(words: str) -> bool:
    """Whether this may be the text of a heading: mostly letters, no sentence, no columns, no code."""
    if _SIGNS.search(words) or words[-1] in _CLOSING or _KEYWORD.match(words) or PROMPT.match(words):
        return False
    if not (words[0].isalnum() or (words[0] in _OPENING and not words.startswith("* "))):
        return False
    if not (_VERSION.match(words) or any(sign.isalpha() for sign in words)):
        return False
    return 2 * sum(sign.isalnum() for sign in words) >= len(words.replace(" ", ""))


def like_code(line: str) -> bool:
    """Whether a line may be code, output, configuration or a patch."""
    words = line.strip()
    if line.startswith(("    ", "\t")):
        return True
    if _LINK.match(words):
        return False
    return any(kind.match(words) for kind in (PROMPT, _KEYWORD, _STATEMENT, _CODE))


def like_prose(line: str) -> bool:
    """Whether a line could follow a heading: it opens a sentence, an item, a quote, a table row, a fence or a heading."""
    if line.startswith(("    ", "\t")):
        return False
    words = line.strip()
    if _ITEM.match(words) or _LINK.match(words):
        return True
    if like_code(line) or (not words[:1].isalnum() and words[:1] not in _OPENING):
        return False
    first = next((sign for sign in words if sign.isalpha()), "")
    return bool(first) and (not first.islower() or len(words.split()) >= 5)


STRETCH = 1 << 18  # characters parsed at a time; the parser's result takes a hundred times the text's memory
_MARK = re.compile(r"#|[\r\n] {0,3}(?:=+|-+)[ \t]*(?:[\r\n]|\Z)")
_NEWLINE = re.compile(r"\r\n?|\n")


def markdown_headings(text: str) -> Iterator[Heading]:
    """Headings in order, by the CommonMark specification, so a `#` in a code block is none.

    Parses one stretch of text at a time. The last block of a stretch may be incomplete, so the next stretch begins with
    it. A block longer than a stretch is parsed again in one of twice the length.
    """
    start = 0
    size = STRETCH
    while start < len(text) and _MARK.search(text, start):
        newline = _NEWLINE.search(text, start + size)
        stop = newline.end() if newline else len(text)
        headings, last = parse_markdown(text[start:stop])
        if stop == len(text):
            last = stop - start
        for heading in headings:
            if heading.start < last:
                yield heading._replace(start=start + heading.start, stop=start + heading.stop)
        start += last
        size = STRETCH if last else 2 * size


def parse_markdown(text: str) -> tuple[list[Heading], int]:
    """Headings of a text, and where its last block starts."""
    tokens = _parser().parse(text)
    starts = [0, *(match.end() for match in _NEWLINE.finditer(text)), len(text)]
    headings = []
    for opening, inline in pairwise(tokens):
        if opening.type != "heading_open" or opening.level > 0 or not opening.map:
            continue
        words = clean_title(inline.content)
        if 0 < len(words) <= MAX_HEADING:
            first, last = opening.map
            stop = starts[min(last, len(starts) - 1)]
            headings.append(Heading(int(opening.tag[1:]), words, starts[first], stop))
    blocks = [token.map[0] for token in tokens if token.level == 0 and token.map]
    return headings, starts[max(blocks, default=0)]


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark")
    parser.core.ruler.disable("inline")  # only blocks matter, and inline parsing is most of the work
    return parser


_RULE = re.compile(r"^(?:={3,}|-{3,})[ \t]*$", re.MULTILINE)
_HASH = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_MARKED = re.compile(r"(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")
_FENCE = re.compile(r"^ {0,3}(`{3,}(?=[^`\n]*$)|~{3,})[ \t]*(.*)$", re.MULTILINE)
_COLUMNS = re.compile(r"\S(?: {2,}|\t)\S")
_LEAST_MARKED = 2  # a single line after a `#` is no evidence
_HEADING_SHARE = 0.75  # of the lines that open with `#`; if fewer are like headings, it marks comments
_GLANCE = 200  # characters by which a neighbour is judged


def plain_headings(text: str) -> tuple[Heading, ...]:
    """Headings in order, outside fenced code."""
    fences = _Fences.of(text)
    headings = [*_underlined(text, fences), *_marked(text, fences)]
    return tuple(sorted(headings, key=lambda heading: heading.start))


class _Line(NamedTuple):
    """A line: characters `start` to `stop - 1`, without its newline. `start` is negative if there is no such line."""

    start: int
    stop: int
    text: str

    @property
    def blank(self) -> bool:
        return not self.text.strip()


class _Fences(NamedTuple):
    """Stretches of fenced code, in order. `closed` if none is left open."""

    spans: tuple[tuple[int, int], ...]
    closed: bool

    @classmethod
    def of(cls, text: str) -> _Fences:
        spans = []
        mark = ""
        start = 0
        for fence in _FENCE.finditer(text):
            if not mark:
                mark = fence[1]
                start = fence.start()
            elif fence[1].startswith(mark) and not fence[2]:
                spans.append((start, fence.end()))
                mark = ""
        return cls(tuple(spans), not mark)

    def outside(self, matches: Iterator[re.Match[str]]) -> Iterator[re.Match[str]]:
        """Those of some ordered matches that are outside all fences."""
        spans = iter((*self.spans, (1 << 62, 1 << 62)))
        span = next(spans)
        for match in matches:
            while span[1] <= match.start():
                span = next(spans)
            if match.start() < span[0]:
                yield match


def _underlined(text: str, fences: _Fences) -> Iterator[Heading]:
    """Lines over a ruler of about their length, or between two rulers."""
    for rule in fences.outside(_RULE.finditer(text)):
        below = _Line(rule.start(), rule.end(), rule[0].rstrip())
        words = _before(text, below)
        above = _before(text, words)
        framed = above.text.rstrip() == below.text and _before(text, above).blank
        title = words.text.strip()
        if not (framed or (above.blank and words.text[:1] == title[:1])) or not 0 < len(title) <= MAX_HEADING:
            continue
        if _long_enough(title, len(below.text), framed) and like_heading(title) and _heads_words(text, below, framed):
            level = 1 if below.text[0] == "=" else 2
            start = above.start if framed else words.start
            yield Heading(level, clean_title(title), start, min(below.stop + 1, len(text)))


def _long_enough(title: str, ruler: int, framed: bool) -> bool:
    columns = sum(2 if east_asian_width(sign) in "WF" else 1 for sign in title)
    return 0.8 * len(title) - 1 <= ruler and (framed or ruler <= 1.25 * columns + 3)


def _heads_words(text: str, ruler: _Line, framed: bool) -> bool:
    """Whether the text after a ruler could follow a heading, and is no table row or prompt."""
    after = _after(text, ruler)
    if _COLUMNS.search(after.text.strip()) or PROMPT.match(after.text):
        return False
    return after.blank or not framed


def _marked(text: str, fences: _Fences) -> list[Heading]:
    """Lines after a `#`, if there are several and nearly all stand like headings: alone, among words."""
    if not fences.closed:
        return []
    count = 0
    headings = []
    for match in fences.outside(_HASH.finditer(text)):
        count += 1
        line = _Line(match.start(), match.end(), match[0])
        marked = _MARKED.match(line.text) if len(line.text) <= MAX_HEADING else None
        if marked and marked[2] and like_heading(marked[2]) and _among_words(text, line):
            stop = min(line.stop + 1, len(text))
            headings.append(Heading(len(marked[1]), clean_title(marked[2]), line.start, stop))
    return headings if len(headings) >= max(_LEAST_MARKED, _HEADING_SHARE * count) else []


def _among_words(text: str, line: _Line) -> bool:
    before = _before(text, line)
    after = _after(text, line)
    if not (before.blank and after.blank):
        return False
    while before.start > 0 and before.blank:
        before = _before(text, before)
    while after.stop < len(text) and after.blank:
        after = _after(text, after)
    return (before.blank or not like_code(before.text)) and like_prose(after.text)


def _before(text: str, line: _Line) -> _Line:
    if line.start <= 0:
        return _Line(-1, -1, "")
    stop = line.start - 1
    start = text.rfind("\n", 0, stop) + 1
    return _Line(start, stop, text[start : min(stop, start + _GLANCE)])


def _after(text: str, line: _Line) -> _Line:
    start = line.stop + 1
    if start > len(text):
        return _Line(len(text), len(text), "")
    stop = text.find("\n", start)
    if stop < 0:
        stop = len(text)
    return _Line(start, stop, text[start : min(stop, start + _GLANCE)])


def find_headings(text: str, markup: Markup = "markdown") -> Iterator[Heading]:
    """All headings in order."""
    return iter(plain_headings(text)) if markup == "plain" else markdown_headings(text)
