"""Formulas of HTML as text: MathML in one line, and the TeX behind what programs draw."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

# MathML in one line. The blank keeps 3 1/4 from becoming 31/4.
_FORMS = {
    "mfrac": " {}/{}",
    "msqrt": "√({})",
    "mtable": " [{}] ",
    "mroot": "{}^(1/{})",
    "msup": "{}^{}",
    "msub": "{}_{}",
    "msubsup": "{}_{}^{}",
    "mover": "{}^{}",
    "munder": "{}_{}",
    "munderover": "{}_{}^{}",
    "mspace": " ",
}
_ROWS = {"msqrt": "", "mtable": "; ", "mtr": ", "}  # joined before the form
_THIN = re.compile(r"\s*0(?:\.0*)?\s*(?:[a-z%]+\s*)?\Z", re.IGNORECASE)
_UNSEEN = ("annotation", "annotation-xml", "mphantom")
_TEX = 'script[type^="math/tex"]'
_DRAWN = ".MathJax, .MathJax_Preview, .MathJax_Display, .MathJax_SVG, .MathJax_CHTML"
_DRAWN_BY_KATEX = ".katex-mathml + .katex-html"
_IN_FORMULA = re.compile(r"math|latex|\btex\b|formula|equation", re.IGNORECASE)
_HIDDEN = re.compile(r"display\s*:\s*none", re.IGNORECASE)
_WIKIPEDIA = re.compile(r"\{\\(?:display|text)style (.*)\}", re.DOTALL)


def write_formulas(tree: LexborHTMLParser) -> None:
    """Write each formula once, as text."""
    for drawn in tree.css(_DRAWN_BY_KATEX):
        drawn.decompose()
    sources = tree.css(_TEX)
    for drawn in reversed(tree.css(_DRAWN) if sources else []):
        drawn.decompose()
    for source in sources:
        source.replace_with(f" {(source.text() or '').strip()} ")
    for picture in tree.css("img[alt]"):
        if _stands_for_formula(picture):
            tex = (picture.attributes["alt"] or "").strip()
            shown = _WIKIPEDIA.fullmatch(tex)
            picture.replace_with(shown[1].strip() if shown else tex)
    for formula in tree.css("math"):
        formula.replace_with(_linear(formula).strip())


def _stands_for_formula(picture: LexborNode) -> bool:
    """Whether a picture is that of a formula, and no visible MathML stands beside it."""
    outer = picture.parent
    classes = [node.attributes.get("class") or "" for node in (picture, outer) if node is not None]
    if outer is None or not any(map(_IN_FORMULA.search, classes)):
        return False
    return all(_is_hidden(formula, outer) for formula in outer.css("math"))


def _is_hidden(node: LexborNode, outer: LexborNode) -> bool:
    """Whether a node inside another is not shown."""
    inner: LexborNode | None = node
    while inner is not None and inner.mem_id != outer.mem_id:
        if _HIDDEN.search(inner.attributes.get("style") or ""):
            return True
        inner = inner.parent
    return False


def _linear(node: LexborNode) -> str:
    """A formula of MathML in one line, such as (a+b)/2 or x_1^2."""
    if node.tag == "-text":
        return (node.text() or "").strip()
    if node.tag in _UNSEEN:
        return ""
    inner = [_linear(child) for child in node.iter(include_text=True)]
    if node.tag == "mfenced":
        return _fenced(node, [formula for formula in inner if formula])
    if node.tag == "mfrac" and _THIN.match(node.attributes.get("linethickness") or ""):
        return f" ({'; '.join(inner)}) "  # a binomial coefficient
    if node.tag in _ROWS:
        inner = [_ROWS[node.tag].join(inner)]
    form = _FORMS.get(node.tag or "", "")
    if len(inner) != form.count("{}"):
        return "".join(inner)
    if len(inner) > 1:
        inner = [_operand(formula) for formula in inner]
    return form.format(*inner)


def _fenced(node: LexborNode, inner: list[str]) -> str:
    """Formulas between brackets. The last separator stands between all that have none."""
    attributes = {"open": "(", "close": ")", "separators": ",", **node.attributes}
    separators = "".join((attributes["separators"] or "").split())
    words = inner[0] if inner else ""
    for number, formula in enumerate(inner[1:]):
        words += separators[number : number + 1] or separators[-1:]
        words += formula
    return f"{attributes['open'] or ''}{words}{attributes['close'] or ''}"


def _operand(formula: str) -> str:
    words = formula.strip()
    if len(words) < 2 or words.isalnum():
        return words
    return f"({words})"
