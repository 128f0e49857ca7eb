"""The texts that stand in the place of pictures, charts and shapes of office files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

PICTURE = "[picture: "
"""How the text of a picture begins."""

_FILE_NAME = re.compile(
    r"[^\n,;:!?]*\.(?:png|jpe?g|jfif|gif|bmp|tiff?|emf|wmf|svgz?|webp|heic|avif|ico|eps|pdf)", re.IGNORECASE
)
_DECORATIVE = "decorative"
_ON = ("1", "true")
_WITH_TEXT = ("docPr", "cNvPr")
_VML = "{urn:schemas-microsoft-com:vml}"


def picture_text(*texts: str | None, name: str = "") -> str:
    """`[picture: TEXT]` for a title and a description; "" if they say nothing, or no more than the name of a file or object."""
    lines = [" ".join((text or "").split()) for text in texts]
    telling = [line for line in lines if line and not _FILE_NAME.fullmatch(line)]
    words = ": ".join(dict.fromkeys(telling))
    is_numbered_name = words == name and re.fullmatch(r"\w+ \d+", words)
    return f"{PICTURE}{words}]" if words and not is_numbered_name else ""


def drawing_texts(drawing: Any) -> Iterator[str]:
    """The texts in the place of a drawing in Open XML or VML and of those inside it, without those for decoration."""
    for element in drawing.iter():
        tag = element.tag if isinstance(element.tag, str) else ""
        name = tag.rpartition("}")[2]
        text = ""
        if name in _WITH_TEXT and not _is_decorative(element):
            text = picture_text(element.get("title"), element.get("descr"), name=element.get("name", ""))
        elif tag.startswith(_VML):
            text = picture_text(element.get("alt"), name=element.get("id", ""))
        if text:
            yield text


def _is_decorative(properties: Any) -> bool:
    return any(
        str(element.tag).endswith("}" + _DECORATIVE) and element.get("val", "1") in _ON for element in properties.iter()
    )
