"""Headers and footers of HTML: what says something of the document stays, navigation and imprints go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

_FRAMES = "header, footer, [role=banner], [role=contentinfo]"
_SECTIONS = ("article", "main", "section", "aside", "blockquote")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_STEERING = (
    "button, [role=button], [role=menu], [role=menubar], [role=toolbar], [role=tablist], input[type=search], "
    "form[action*=search], form[class*=search], form[id*=search], [class*=breadcrumb], [class*=pagination], "
    "[class*=skip-], [class*=skiplink], [class*=searchbox], label[class*=toggle], label[for^=__], select[onchange]"
)
_BLOCKS = (
    "address article aside blockquote center dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 "
    "header hr legend li main ol p pre section summary table tbody td tfoot th thead tr ul"
)
_IS_BLOCK = frozenset(_BLOCKS.split())
_ANY_BLOCK = ", ".join(_BLOCKS.split())
_ANY_HEADING = ", ".join(_HEADINGS)
_FILLED = "img, svg, input, select, textarea, math, object, meter, progress"
_TOOLS = (
    "sphinx|mkdocs|material for|read the docs|furo|alabaster|pydata|doxygen|docusaurus|hugo|jekyll|pandoc|asciidoctor|javadoc"
    "|gitbook|wordpress|drupal|mediawiki|github|netlify|vuepress|vitepress|mdbook|antora|quarto|jupyter|gtk-doc|docbook|typedoc"
)
_NOISE = re.compile(
    rf"(?:(?:documentation )?(?:built|made|created|generated|rendered|theme|hosted)\b.*\b(?:{_TOOLS})\b.*"
    r"|(?:proudly )?powered by\b.*|all rights reserved|alle rechte vorbehalten"
    r"|(?:skip|jump) to (?:main |the )*(?:content|navigation|menu|search|footer)|(?:back to|to the|go to) top|top of page"
    r"|menu|search|home|print|close|prev(?:ious)?(?: page)?|next(?: page)?|(?:view |show )?(?:page )?source|edit this page"
    r"|toggle [\w /]*|edit on \w+)\W*",
    re.IGNORECASE,
)
_COPYRIGHT = re.compile(r"\W*(?:©|\(c\)|copyright\b)", re.IGNORECASE)
_YEAR = re.compile(r"\b(?:19|20)\d\d\b")
_TURNING = re.compile(r"\W*(?:prev(?:ious)?|next|back|forward|up|zurück|weiter|vorherige|nächste)\b", re.IGNORECASE)
_TURNING_NAME = re.compile(r"(?:^|[\s_-])(?:prev(?:ious)?|next)(?:$|[\s_-])", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[\w)]{3}[.!])\s+(?=[^\W\d_a-z])|\s*[|•·]\s*")
_DIGIT = re.compile(r"\d")
_TELLING = re.compile(r"\d|\w@\w")  # a number or an address of mail


def clear_frames(tree: LexborHTMLParser) -> None:
    """Leave in headers and footers what a reader of the document would miss.

    Menus, search fields, links to other pages, notices of copyright and of programs go, and what an earlier frame says.
    """
    texts: set[str] = set()
    for frame in distinct(tree.css(_FRAMES)):
        if _is_inside_a_frame(frame):
            continue
        is_of_page = not _is_inside(frame, _SECTIONS)
        if is_of_page:
            for control in reversed(distinct(frame.css(_STEERING))):
                if control.mem_id != frame.mem_id and control.css_first(_ANY_HEADING) is None:
                    control.decompose()
        for line in list(_lines(frame)):
            _clear(line, is_of_page)
        text = _words(frame.text())
        is_repeated = is_of_page and text in texts
        if is_repeated or _is_empty(frame):  # a rule would be all that is left
            frame.decompose()
        elif text:
            texts.add(text)


def distinct(nodes: list[LexborNode]) -> list[LexborNode]:
    """Each node once. The parser returns one again for each selector of a list that it matches."""
    return list({node.mem_id: node for node in nodes}.values())


def _is_inside(node: LexborNode, tags: tuple[str, ...]) -> bool:
    outer = node.parent
    while outer is not None and outer.tag not in tags:
        outer = outer.parent
    return outer is not None


def _is_inside_a_frame(node: LexborNode) -> bool:
    outer = node.parent
    while outer is not None:
        if outer.tag in ("header", "footer") or outer.attributes.get("role") in ("banner", "contentinfo"):
            return True
        outer = outer.parent
    return False


def _lines(block: LexborNode) -> Iterator[list[LexborNode]]:
    """The lines of a block: neighbours that no block and no line break divides. Headings and code are no such lines."""
    line: list[LexborNode] = []
    for child in block.iter(include_text=True):
        is_block = child.tag in _IS_BLOCK or _holds_blocks(child)
        if not is_block and child.tag != "br":
            line.append(child)
            continue
        if line:
            yield line
        line = []
        if is_block and child.tag not in (*_HEADINGS, "pre"):
            yield from _lines(child)
    if line:
        yield line


def _holds_blocks(node: LexborNode) -> bool:
    """Whether an inline element is around blocks. A link is a line whatever is in it, unless that is a heading."""
    if node.tag == "-text":
        return False
    return node.css_first(_ANY_HEADING if node.tag == "a" else _ANY_BLOCK) is not None


def _clear(line: list[LexborNode], is_of_page: bool) -> None:
    """Remove a line that only leads elsewhere, and the sentences of one that say nothing of the document."""
    words = _words("".join(node.text() for node in line))
    links = [link for node in line if node.tag != "-text" for link in node.css("a[href]")]
    if _leads_elsewhere(words, links, is_of_page):
        _replace(line, "")
        return
    sentences = [sentence for sentence in _SENTENCE.split(words) if sentence]
    telling = [sentence for sentence in sentences if not _says_nothing(sentence)]
    if len(telling) < len(sentences):
        _replace(line, " ".join(telling))


def _leads_elsewhere(words: str, links: list[LexborNode], is_of_page: bool) -> bool:
    """Whether a line has links alone: those to the pages before and after, and in a page's frame any menu."""
    plain_words = words
    for link in links:
        plain_words = plain_words.replace(_words(link.text()), " ", 1)
    if not links or re.search(r"\w", _TURNING.sub("", plain_words)):
        return False
    if any(_turns_the_page(link) for link in links):
        return True
    is_alone = len(links) == 1 and not _is_inside(links[0], ("li",))
    names_something = is_alone and _TELLING.search(words) is not None
    return is_of_page and not names_something


def _turns_the_page(link: LexborNode) -> bool:
    names = f"{link.attributes.get('rel') or ''} {link.attributes.get('class') or ''}"
    return _TURNING_NAME.search(names) is not None or _TURNING.match(_words(link.text())) is not None


def _says_nothing(sentence: str) -> bool:
    """Whether a sentence is there on every page of a site: a copyright without a number but years, or a program's notice."""
    if _COPYRIGHT.match(sentence):
        return _DIGIT.search(_YEAR.sub("", sentence)) is None
    return _NOISE.fullmatch(sentence) is not None


def _replace(line: list[LexborNode], words: str) -> None:
    first, *following = line
    for node in following:
        node.decompose()
    if words:
        first.replace_with(words)
        return
    outer = first.parent
    first.decompose()
    while outer is not None and outer.tag in ("li", "ul", "ol") and _is_empty(outer):  # a list would keep its signs
        inner, outer = outer, outer.parent
        inner.decompose()


def _is_empty(node: LexborNode) -> bool:
    return not node.text().strip() and node.css_first(_FILLED) is None


def _words(text: str) -> str:
    return " ".join(text.split())
