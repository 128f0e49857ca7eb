"""Markdown, plain text and source code."""

from __future__ import annotations

import re

from blend_retrieval.decoding import decode
from blend_retrieval.document import clean
from blend_retrieval.headings import markdown_headings
from blend_retrieval.readers.base import Fault, Part, Parts, notes

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?=[^\s])(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_BUILD_FILES = (
    *("makefile", "gnumakefile", "dockerfile", "containerfile", "jenkinsfile", "vagrantfile", "gemfile", "rakefile"),
    *("procfile", "justfile", ".env"),
)
_LONGEST_FRONT_MATTER = 1 << 16


def read_text(data: bytes, title: str) -> Parts:
    """Read plain text, titled by its file name."""
    text, note = decode(data)
    document = Part("", title, text, "plain")
    return [document, *notes(note)]


def read_code(data: bytes, title: str) -> Parts:
    """Read source code or a log, whose comments and rulers are no headings."""
    parts = read_text(data, title)
    return list(map(_as_code, parts))


def _as_code(part: Part | Fault) -> Part | Fault:
    return part._replace(markup="code") if isinstance(part, Part) else part


def read_unnamed(data: bytes, title: str) -> Parts:
    """Read text in a file without a suffix, titled by its name. Scripts and build files have comments, but no headings."""
    parts = read_text(data, title)
    is_script = data.startswith(b"#!")
    if is_script or title.lower().startswith(_BUILD_FILES):
        return list(map(_as_code, parts))
    return parts


def read_markdown(data: bytes, title: str) -> Parts:
    """Read Markdown, titled by its front matter, or by its first heading if it opens with one."""
    decoded, note = decode(data)
    named, text = _without_front_matter(clean(decoded))
    first = next(markdown_headings(text), None)
    if first is not None and not named:
        text_above = text[: first.start].strip()
        named = "" if text_above else first.text
    document = Part("", named or title, text, "markdown")
    return [document, *notes(note)]


def _without_front_matter(text: str) -> tuple[str, str]:
    """The title that YAML at the top names, or "", and the text after it. Other text between two rules stays."""
    from yaml import YAMLError, safe_load

    front = _FRONT_MATTER.match(text)
    if front is None or len(front[1]) > _LONGEST_FRONT_MATTER:
        return "", text
    try:
        fields = safe_load(front[1])
    except (YAMLError, ValueError, RecursionError):  # ValueError: a day that is in no calendar
        return "", text
    keys = map(str, fields) if isinstance(fields, dict) else ()
    if not any(map(str.islower, keys)):  # `Note: ...` is prose
        return "", text
    title = fields.get("title") or ""
    if isinstance(title, (list, dict, set)):  # of which some name others over and over, and grow without end
        title = ""
    return str(title), text[front.end() :]
