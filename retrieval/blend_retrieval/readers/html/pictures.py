"""Texts in place of HTML's pictures, as `[picture: Pier 3 at low tide]`. Decoration has none."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from blend_retrieval.readers.html.frames import distinct

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

PICTURE = re.compile(r"\[picture: [^\]]*\]")
_PICTURES = "img, area, input[type=image i], [role=img]"
_HIDING = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_FILE_NAME = re.compile(r"\S+\.(?:png|jpe?g|gif|svg|webp|bmp|ico|tiff?|avif|heic|emf|wmf)", re.IGNORECASE)
_EMPTY_WORDS = re.compile(  # they say that a picture is there
    r"(?:an? )?(?:image|picture|photo|graphic|img|icon|logo|bullet|spacer|blank|divider|separator|line|dot|pixel|thumbnail"
    r"|anchor|permalink|external link)",
    re.IGNORECASE,
)
_LOGO = re.compile(r".*\blogo(?:type)?", re.IGNORECASE)
_TURNING = re.compile(r"\W*(?:prev(?:ious)?|next|up|home|top|back|forward|contents|index)\W*", re.IGNORECASE)
_QUERY = re.compile(r"[?#].*", re.DOTALL)
_PIXELS = re.compile(r"\s*(\d+)(?:\.\d+)?\s*(?:px)?\s*")
_STYLE_SIZE = r"(?:^|;)\s*{}\s*:\s*(\d+)(?:\.\d+)?px"
_ICON = 24  # pixels
_LOW_ICON = 16  # pixels of height, where the width is not known: badges with words are 20 high
_SPACER = 4  # pixels
_OFTEN = 3
_LONGEST_SIGN = 3  # characters: some emoji are composed
_LEVELS = 4  # of elements around a picture, in which the nearest words are looked for
_INLINE = (
    *(
        "-text",
        "a",
        "abbr",
        "b",
        "cite",
        "code",
        "em",
        "font",
        "i",
        "label",
        "mark",
        "object",
        "picture",
        "q",
        "s",
        "small",
    ),
    *("source", "span", "strong", "sub", "sup", "u"),
)
_OPENING = ("(", "[", "„", "“", "«")
_WAYS = ("prev", "next")
_WITHOUT_CONTENT = ("img", "area", "input")
_CELLS = ("td", "th")


def write_pictures(tree: LexborHTMLParser) -> None:
    """Write the text of each picture in its place, and remove pictures without one."""
    pictures = distinct(tree.css(_PICTURES))
    frequency = Counter(_identity(picture) for picture in pictures)
    texts = [_text(picture, frequency) for picture in pictures]
    for picture, text in zip(pictures, texts, strict=True):
        if picture.tag in _WITHOUT_CONTENT:
            picture.replace_with(_apart(picture, text))
            continue
        holds_more = _line(picture.text()) or picture.css_first("img, svg")
        if text and not holds_more:
            picture.insert_child(text)


def drawing_text(drawing: LexborNode) -> str:
    """The title of a drawing in SVG, and its labels: all that can be read of it."""
    if _is_hidden(drawing):
        return ""
    labels = [_line(label.text()) for label in drawing.css("text, foreignObject")]
    words = "; ".join(filter(None, labels))
    name = _name(drawing)
    if not name or _is_small(drawing) or _letters(name) == _letters(words):
        return words
    if _is_said_beside(drawing, name):
        return words
    return f"{_marked(name)} {words}".rstrip()


def _name(drawing: LexborNode) -> str:
    for child in drawing.iter():
        if child.tag == "title":
            return _line(child.text())
    return _line(drawing.attributes.get("aria-label") or "")


def _identity(picture: LexborNode) -> tuple[str, str]:
    return picture.attributes.get("src") or "", _alternative(picture)


def _alternative(picture: LexborNode) -> str:
    attributes = picture.attributes
    words = attributes.get("alt")
    if "alt" not in attributes:
        words = attributes.get("aria-label") or attributes.get("title")
    return _line(words or "")


def _text(picture: LexborNode, frequency: Counter[tuple[str, str]]) -> str:
    """The text in a picture's place; "" for decoration."""
    words = _alternative(picture)
    if not words or _is_hidden(picture) or _is_spacer(picture):
        return ""
    if _is_sign(words):
        return words
    is_in_a_row = _has_its_like_beside(picture)  # such as the stars of a rating
    if not any(map(str.isalnum, words)):
        return words if is_in_a_row else ""
    if _says_nothing(picture, words):
        return ""
    if _is_said_beside(picture, words):
        return ""
    if is_in_a_row or _is_alone_in_a_cell(picture):  # and so it is the cell's value, however small
        return _marked(words)
    if _is_small(picture):
        return ""
    is_repeated = picture.tag == "img" and frequency[_identity(picture)] >= _OFTEN
    return "" if is_repeated and _is_bullet(picture, words) else _marked(words)


def _is_bullet(picture: LexborNode, words: str) -> bool:
    """Whether a repeated picture opens a line, and states no number."""
    has_number = any(map(str.isdigit, words))
    return not has_number and not _touching(picture, "prev").strip()


def _marked(words: str) -> str:
    return f"[picture: {words}]" if any(map(str.isalnum, words)) else words


def _is_sign(words: str) -> bool:
    """Whether a picture stands for a character, such as an emoji or a tick."""
    if words.isascii() or len(words) > _LONGEST_SIGN:
        return False
    kinds = map(unicodedata.category, words)
    return any(kind in ("So", "Sm") for kind in kinds)


def _says_nothing(picture: LexborNode, words: str) -> bool:
    """Whether a text is a file's name, a word for pictures, or the way to another page or site."""
    if _FILE_NAME.fullmatch(words) or _EMPTY_WORDS.fullmatch(words):
        return True
    if _is_name_of_file(picture, words):
        return True
    outer = picture.parent
    if outer is None or outer.tag != "a":
        return False
    return bool(_TURNING.fullmatch(words) or _LOGO.fullmatch(words))


def _is_name_of_file(picture: LexborNode, words: str) -> bool:
    """Whether a text is the file's name. A word without a suffix is none where it is a cell's value, or inside a sentence."""
    source = picture.attributes.get("src") or ""
    place = _QUERY.sub("", source)
    path = PurePosixPath(unquote(place))
    if words in (source, path.name) and path.suffix:
        return True
    if words != path.stem:
        return False
    before, behind = _beside(picture)
    is_in_a_sentence = before and behind
    is_a_word = is_in_a_sentence or _is_alone_in_a_cell(picture)
    return not (is_a_word and words.isalpha())


def _is_hidden(picture: LexborNode) -> bool:
    attributes = picture.attributes
    if "hidden" in attributes or attributes.get("aria-hidden") == "true":
        return True
    if attributes.get("role") in ("presentation", "none"):
        return True
    style = attributes.get("style") or ""
    return _HIDING.search(style) is not None


def _sizes(picture: LexborNode) -> tuple[int | None, int | None]:
    """Width and height in pixels, where the page says them."""
    return _size(picture, "width"), _size(picture, "height")


def _size(picture: LexborNode, name: str) -> int | None:
    attributes = picture.attributes
    style = attributes.get("style") or ""
    in_style = re.search(_STYLE_SIZE.format(name), style, re.IGNORECASE)
    size = in_style or _PIXELS.fullmatch(attributes.get(name) or "")
    return int(size[1]) if size else None


def _is_spacer(picture: LexborNode) -> bool:
    return any(size is not None and size <= _SPACER for size in _sizes(picture))


def _is_small(picture: LexborNode) -> bool:
    width, height = _sizes(picture)
    if width is None:
        return height is not None and height <= _LOW_ICON
    return width <= _ICON and (height is None or height <= _ICON)


def _is_alone_in_a_cell(picture: LexborNode) -> bool:
    cell = picture.parent
    while cell is not None and cell.tag not in _CELLS:
        cell = cell.parent
    return cell is not None and not _line(cell.text())


def _has_its_like_beside(picture: LexborNode) -> bool:
    identity = _identity(picture)
    for way in _WAYS:
        node = _neighbour(picture, way)
        if node is not None and node.tag == "img" and _identity(node) == identity:
            return True
    return False


def _neighbour(node: LexborNode, way: str) -> LexborNode | None:
    """The next node on one side that is no blank."""
    beside: LexborNode | None = getattr(node, way)
    while beside is not None and beside.tag == "-text" and not _line(beside.text()):
        beside = getattr(beside, way)
    return beside


def _beside(picture: LexborNode) -> list[str]:
    """The nearest words before and behind a picture, in its cell or in its block."""
    node: LexborNode | None = picture
    for _ in range(_LEVELS):
        if node is None or node.tag == "body":
            break
        if node.tag in _CELLS and "rowspan" not in node.attributes:
            break
        neighbours = [_neighbour(node, way) for way in _WAYS]
        if any(neighbours):
            return [_line(beside.text()) if beside else "" for beside in neighbours]
        node = node.parent
    return ["", ""]


def _is_said_beside(picture: LexborNode, words: str) -> bool:
    """Whether the words that touch a picture begin or end with its text."""
    before, behind = (f" {_letters(text)} " for text in _beside(picture))
    letters = f" {_letters(words)} "
    return before.endswith(letters) or behind.startswith(letters)


def _letters(words: str) -> str:
    return " ".join(re.findall(r"\w+", words.casefold()))


def _apart(picture: LexborNode, text: str) -> str:
    """The text with blanks to the words that touch it; a blank alone where two words would touch without the picture."""
    before = _touching(picture, "prev")[-1:]
    behind = _touching(picture, "next")[:1]
    if not text:
        are_words = before.isalnum() and behind.isalnum()
        return " " if are_words else ""
    if before.strip() and before not in _OPENING:
        text = f" {text}"
    if behind.isalnum() or behind == "[":
        text = f"{text} "
    return text


def _touching(picture: LexborNode, way: str) -> str:
    """The text that touches a picture on one side, in its line."""
    node: LexborNode | None = picture
    while node is not None:
        beside: LexborNode | None = getattr(node, way)
        if beside is not None:
            return beside.text() if beside.tag in _INLINE else ""
        node = node.parent
        if node is not None and node.tag not in _INLINE:
            return ""
    return ""


def _line(words: str) -> str:
    return " ".join(words.split())
