"""Directives of reStructuredText: those of docutils with any option, and those of Sphinx and its extensions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from blend_retrieval.readers.base import Fault

_USED = re.compile(r"\.\.[ \t]+(?:\|[^|\n]+\|[ \t]+)?([^\W_](?:[\w.+:-]*[^\W_])?)[ ]?::")
# Directives that read no option of their own, or whose content defines something.
_AS_THEY_ARE = ("replace", "unicode", "role", "default-role", "title", "meta", "header", "footer", "target-notes")
_VERSIONS = {
    "versionadded": "Added in version",
    "versionchanged": "Changed in version",
    "versionremoved": "Removed in version",
    "deprecated": "Deprecated since version",
    "deprecated-removed": "Deprecated since version",
}
_TAKEN_IN = (
    "include",
    "literalinclude",
    "mdinclude",
    "cmake-module",
    "program-output",
    "command-output",
    "click",
    "argparse",
)
_OTHER_FILE = "is another file, which is not taken in"
_GENERATED = re.compile(r"auto|doxygen|.*:auto")
_LITERAL = re.compile(
    r".*(?:code|plot|graph|diag|math)|code-.*|graphviz|mermaid|plantuml|uml|ditaa|tikz|prompt|doctest|test(?:code|output|setup|cleanup)"
    r"|ipython|jupyter-execute|exec|console|terminal|productionlist|highlight-rst|raw-html|yaml|json|algorithm|pseudocode"
)
_OBJECTS = frozenset(
    """attribute cfunction class classmethod cmacro cmdoption confval constant ctype cvar data decorator describe directive
    enum enumerator envvar event exception function genex macro member method module object opcode option program property
    role setting signature staticmethod struct type union var variable""".split()  # noqa: SIM905  # a list takes 40 lines
)
_LABELS = {"seealso": "See also", "currentmodule": "Module"}
_WITHOUT_LABEL = re.compile(
    r"tab|grid|card|panel|column|dropdown|details|container|hlist|centered|glossary|button|div|rst-class|cssclass"
)
_LAYOUT = ("tabularcolumns", "highlight", "highlightlang", "default-domain", "nosearch", "raggedright")
_STYLE = re.compile(r"[a-z][a-z0-9 -]*")
_TITLES = ("caption", "title", "subtitle", "header", "footer", "summary", "alt", "synopsis")
_FLAGS = ("deprecated", "async", "abstract", "abstractmethod", "static", "classmethod", "final", "required", "optional")
_TECHNICAL = re.compile(
    r"(?:class|name|width|height|scale|align|figwidth|figclass|target|link|linenos|lineno|emphasize|dedent|force|nowrap|label"
    r"|number|start|end|lines|pyobject|append|prepend|diff|tab|encoding|language|maxdepth|hidden|glob|titlesonly|includehidden"
    r"|reversed|depth|local|backlinks|widths|header-rows|stub|delim|quote|escape|keepspace|members|undoc|private|special"
    r"|inherited|show|exclude|member|no|ignore|canonical|toctree|template|recursive|nosignatures|gutter|margin|padding|sync"
    r"|open|animate|color|icon|columns|outline|shadow|text-align|img|collapsible|loading|layout|size|trim|strip|group|id)"
    r"(?:[-_].*|s|index|indexentry|contentsentry|typesetting|block)?"
)


class _Unknown(str):
    """The value of an option that a directive of docutils does not have."""


class _Options(dict[str, Any]):
    """Options of a directive, and any other. A value that docutils refuses is left out, rather than the whole block."""

    def __getitem__(self, name: str) -> Callable[[str | None], Any]:
        convert = self.get(name)
        if convert is None:
            return lambda value: _Unknown(value or "")

        def converted(value: str | None) -> Any:
            try:
                return convert(value)
            except (ValueError, TypeError):
                return _Unknown("")

        return converted


def register_directives(text: str) -> None:
    """Make docutils read every directive that is used in a text.

    docutils keeps directives for the whole process. These read what its own read, and more.
    """
    from docutils.parsers.rst import Directive, directives, languages
    from docutils.utils import new_document

    english = languages.get_language("en")
    names = {match[1].lower() for match in _USED.finditer(text)} - set(_AS_THEY_ARE)
    for name in names:
        directive = directives._directives.get(name)
        if isinstance(directive, type) and issubclass(directive, _Shown | _Date):
            continue
        if name in english.directives and directive is None:
            directive, _ = directives.directive(name, english, new_document(""))
        if directive is None or name in _OWN or name in _TAKEN_IN:
            kind = _OWN.get(name, SphinxDirective)
            directives.register_directive(name, type(kind.__name__, (kind, Directive), {}))
        elif directive.option_spec:
            members = {"option_spec": _Options(directive.option_spec)}
            directives.register_directive(name, type(directive.__name__, (Lenient, directive), members))


def is_directive(name: str) -> bool:
    """Whether docutils or Sphinx has a directive of this name."""
    from docutils.parsers.rst import languages

    return (
        name in languages.get_language("en").directives or name in _VERSIONS or name in _TAKEN_IN or name == "seealso"
    )


def unread_places(document: Any) -> list[Fault]:
    """What was not read of a document so far."""
    places: list[Fault] = document.__dict__.setdefault("unread_places", [])
    return places


class _Date:
    """The day on which a document is built: it would change a text that does not change."""

    has_content = True

    def run(self) -> list[Any]:
        from docutils import nodes

        return [nodes.Text("[date]")]


class _Shown:
    """What both kinds of directives share: texts of options, and places not read. Stands before the class of docutils."""

    name: str
    arguments: list[str]
    options: dict[str, Any]
    content: Any
    lineno: int
    content_offset: int
    block_text: str
    state: Any
    state_machine: Any

    def unread(self, place: str, reason: str) -> None:
        unread_places(self.state.document).append(Fault(place, reason))

    def option_texts(self, options: dict[str, str]) -> list[Any]:
        """Paragraphs for the options that a reader of the built page sees."""
        paragraphs = []
        for name, value in options.items():
            if name in _FLAGS:
                paragraphs.append(self.paragraph(_label(name), value))
            elif not value.strip():
                continue
            elif name in _TITLES or not _TECHNICAL.fullmatch(name):
                label = "" if name in _TITLES else _label(name)
                paragraphs.append(self.paragraph(label, value))
        return paragraphs

    def paragraph(self, label: str, markup: str) -> Any:
        """A paragraph of a label and inline markup."""
        from docutils import nodes

        inline, messages = self.state.inline_text(markup, self.lineno)
        opening = f"{label}: " if label and markup else label
        return nodes.paragraph("", "", nodes.Text(opening), *inline, *messages)

    def unknown_options(self) -> dict[str, str]:
        """Take the options that docutils lacks, or whose values it refuses, out of the options."""
        unknown = {name: str(value) for name, value in self.options.items() if isinstance(value, _Unknown)}
        for name in unknown:
            del self.options[name]
        return unknown


class Lenient(_Shown):
    """A directive of docutils with any option. Other files are named instead of taken in."""

    def run(self) -> list[Any]:
        """What docutils makes of it, below the options that docutils lacks."""
        texts = self.option_texts(self.unknown_options())
        place = self.options.get("file") or self.options.get("url")
        if place and self.name in ("csv-table", "raw"):
            self.unread(place, _OTHER_FILE)
            return [*texts, self.paragraph("", " ".join([*self.arguments[:1], f"({place})"]))]
        built: list[Any] = super().run()  # type: ignore[misc]  # of docutils' class
        return [*texts, *built]


class SphinxDirective(_Shown):
    """A directive that docutils lacks: its name, argument, options and content."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec = _Options(name=str)

    def run(self) -> list[Any]:
        """Its name and argument, options and content, as a reader of the built page sees them."""
        title, content = self._title_and_content()
        texts = self.option_texts(self.unknown_options())
        kind = self.name.lower()
        if kind in _VERSIONS:
            opening = [self._version(title)]
        elif kind == "toctree":
            return [*texts, *self._entries([*title.splitlines(), *content])]
        elif kind in _LAYOUT:
            opening = []
        elif kind in _TAKEN_IN or _GENERATED.match(kind):
            opening = self._named(kind, title)
        elif _LITERAL.fullmatch(kind):
            return [*self._opening(kind, title), *texts, *self._code(title, "\n".join(content))]
        else:
            opening = self._opening(kind, title)
        return [*opening, *texts, *self._nested(content)]

    def _code(self, title: str, code: str) -> list[Any]:
        """The content as it stands. Where there is none, the argument names a file."""
        from docutils import nodes

        if title and not code:
            self.unread(title.partition("\n")[0], _OTHER_FILE)
        return [nodes.literal_block(code, code)] if code else []

    def _nested(self, content: Any) -> list[Any]:
        """The content, whose headings are below those around it, whatever their rulers are."""
        from docutils import nodes

        memo, container = self.state.memo, nodes.container()
        styles, level = memo.title_styles, memo.section_level
        memo.title_styles, memo.section_level = [], 0
        self.state.nested_parse(content, self.content_offset, container, match_titles=True)
        memo.title_styles, memo.section_level = styles, level
        return list(container.children)

    def _title_and_content(self) -> tuple[str, Any]:
        """The text behind the name and the text below. docutils takes a text that starts in the next line for an argument."""
        from docutils.statemachine import StringList

        title = self.arguments[0] if self.arguments else ""
        first_line = self.block_text.partition("\n")[0]
        if not title or not first_line.rstrip().endswith("::"):
            return title, self.content
        lines = [*title.splitlines(), "", *self.content]
        return "", StringList(lines, self.state.document.current_source or "")

    def _version(self, title: str) -> Any:
        version, _, words = title.partition(" ") if " " in title.partition("\n")[0] else title.partition("\n")
        label = f"{_VERSIONS[self.name.lower()]} {version}".rstrip()
        return self.paragraph(label, words.strip())

    def _entries(self, lines: list[str]) -> list[Any]:
        """The pages that a table of contents names; they are files of their own."""
        from docutils import nodes

        entries = [" ".join(line.replace("<", "(").replace(">", ")").split()) for line in lines if line.strip()]
        items = [nodes.list_item("", nodes.paragraph("", entry)) for entry in entries]
        return [nodes.bullet_list("", *items)] if items else []

    def _named(self, kind: str, title: str) -> list[Any]:
        from docutils import nodes

        reason = _OTHER_FILE if kind in _TAKEN_IN else "is taken from source code by Sphinx, and not read"
        self.unread(title or kind, reason)
        return [nodes.paragraph("", f"{_label(kind)}: {title}" if title else _label(kind))]

    def _opening(self, kind: str, title: str) -> list[Any]:
        """The name and argument of a directive: a signature as code, other arguments as text."""
        from docutils import nodes

        name = kind.rpartition(":")[2]
        if ":" in kind or name in _OBJECTS:
            signatures = title.replace("\\\n", " ").splitlines()
            return [nodes.paragraph("", f"{_label(name)} ", nodes.literal("", words.strip())) for words in signatures]
        label = "" if _WITHOUT_LABEL.match(name) else _label(name)
        if not label and not title.strip("0123456789 "):  # the number of columns
            return []
        return [self.paragraph(label, title)] if label or title else []


class _Class(SphinxDirective):
    """A class of Python, as Sphinx takes it; or a class of the elements below, as docutils does, where it reads like one."""

    def run(self) -> list[Any]:
        from docutils.parsers.rst.directives.misc import Class

        title = " ".join(self.arguments)
        if not _STYLE.fullmatch(title):
            return super().run()
        place = (self.lineno, self.content_offset, self.block_text, self.state, self.state_machine)
        classes: list[Any] = Class(self.name, [title], {}, self.content, *place).run()
        return classes


_OWN: dict[str, type] = {"date": _Date, "class": _Class}


def _label(name: str) -> str:
    words = name.rpartition(":")[2].replace("-", " ").replace("_", " ")
    return _LABELS.get(name, words[:1].upper() + words[1:])
