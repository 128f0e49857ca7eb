"""Word files as Markdown through mammoth, after what mammoth leaves out is written into the text."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator

from blend_retrieval.readers.base import Fault, Part, Parts
from blend_retrieval.readers.html.html import html_to_markdown
from blend_retrieval.readers.office.docx_text import Package, WordText
from blend_retrieval.readers.office.numbered import numbered_markdown
from blend_retrieval.readers.zipped import opened_zip

_STYLES = "p[style-name='Title'] => h1:fresh\np.Title => h1:fresh"
_IGNORED = "An unrecognised element was ignored: "
_HARMLESS = re.compile(r"w:(?:perm(?:Start|End)|customXml\w+Range\w+|move\w+Range\w+|tblPrEx|\w+Pr)|\{.*")
_NO_LOSS = re.compile(
    r".* style with ID |Unrecognised \w+ style|Unsupported break type|unexpected non-|Image of type |Ignoring complex field "
)


def read_docx(data: bytes, title: str) -> Parts:
    """Read one document under its first heading, with numbers of lists, choices in forms, comments, headers and footers.

    Pictures, diagrams and hidden text are notes; elements that are of an unknown kind are faults.
    """
    import mammoth

    with opened_zip(data) as archive:
        text = WordText(Package(archive))
        prepared = text.prepared()
    no_pictures = mammoth.images.img_element(lambda image: {"src": "", "alt": ""})  # their texts are written already
    styles = "\n".join([_STYLES, *text.heading_styles()])
    result = mammoth.convert_to_html(io.BytesIO(prepared), convert_image=no_pictures, style_map=styles)
    heading, markdown = html_to_markdown(result.value)
    document = Part("", numbered_markdown(heading) or title, numbered_markdown(markdown), "markdown")
    faults = list(_faults(message.message for message in result.messages))
    return [document, *text.faults(), *faults]


def _faults(messages: Iterator[str]) -> Iterator[Fault]:
    for message, count in Counter(messages).items():
        name = message.removeprefix(_IGNORED)
        if name == message:
            if not _NO_LOSS.match(message):
                yield Fault("", f"is not read whole: {message}", count)
        elif not _HARMLESS.fullmatch(name):
            yield Fault(f"element {name}", "is of a kind that is not read", count)
