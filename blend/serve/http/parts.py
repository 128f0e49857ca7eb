"""What the parts of a message say to a model that reads text alone.

Text is taken whole. What has no text, such as a picture, stands as its name and size, so that a conversation that holds one can
go on. A question about it is refused: see `require_text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, InstanceOf, ValidationInfo

from blend.serve.http.errors import wrong
from blend.text import json_text, shown

_TEXT_TYPES = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_OF_TEXT = ("type", "text", "annotations", "logprobs", "citations", "cache_control", "prompt_cache_breakpoint")
"""Fields of text, of which only the text itself reaches the model."""
_TEXTS = (
    *("title", "context", "source", "text", "refusal", "content", "output", "stdout", "stderr", "transcript", "url"),
    *("lines", "new_lines", "tool_references", "error_message", "error_code"),
)
"""Fields with text of parts of unknown types, in the order in which it is written."""
_NAMES = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "picture"),
    **dict.fromkeys(("audio", "input_audio"), "sound"),
    **dict.fromkeys(("file", "input_file", "container_upload"), "file"),
    **dict.fromkeys(("video", "video_url"), "film"),
    "document": "document",
}
"""What parts without text are called, by their types."""
_DATA = ("data", "file_data", "image_url", "url")
"""Fields that may hold the content of such a part in base64."""
_LONGEST_ADDRESS = 200  # characters
_MOST_NAMED = 8  # in a note


class Content(NamedTuple):
    """The text of a message's content. unread: names of parts without text, which stand in it."""

    text: str
    unread: tuple[str, ...] = ()


def _content(value: Any, info: ValidationInfo) -> Any:
    """`content_of`, which notes the unknown fields of text."""
    content = content_of(value)
    if info.context is not None and isinstance(value, list):
        texts = [part for part in value if isinstance(part, dict) and part.get("type") in _TEXT_TYPES]
        unknown = {name for part in texts for name, field in part.items() if field is not None and name not in _OF_TEXT}
        info.context.update(f"content.{name}" for name in unknown)
    return content


def content_of(value: Any) -> Any:
    """The content of a message: text, or the lines of its parts. Raises `ValueError` for what is neither."""
    if value is None or isinstance(value, Content):
        return value
    if isinstance(value, str):
        return Content(value)
    if not isinstance(value, list):
        raise ValueError("give a text, or a list of parts")
    parts = [part_of(part, number) for number, part in enumerate(value)]
    return Content("\n".join(part.text for part in parts), tuple(name for part in parts for name in part.unread))


Written = Annotated[InstanceOf[Content], BeforeValidator(_content)]
"""The content of a message in a body."""


def part_of(part: Any, number: int) -> Content:
    """What a part says. number: of the part, for messages. Raises `ValueError` for what is no part."""
    if isinstance(part, str):
        return Content(part)
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"part {number} is {shown(part)}; give objects with a type")
    if kind in _TEXT_TYPES:
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} has no text")
        return Content(part["text"])
    if kind == "tool_reference":
        return Content(f"[tool {part.get('tool_name')}]")
    if isinstance(part.get("input"), dict):  # a call of a provider's own tool
        return Content(f"[{part.get('name') or kind} {json_text(part['input'])}]")
    if kind == "document":
        return _document(part, number)
    if kind in _NAMES:
        return _named(part)
    texts = "\n".join(_texts(part))
    return Content(texts) if texts else Content(f"[{kind}]", (kind,))


def _document(part: Mapping[str, Any], number: int) -> Content:
    """A document of the Messages API: its title, context and text."""
    source = part.get("source")
    if not isinstance(source, dict):
        raise ValueError(f"part {number} is a document without a source")
    data = source.get("data") if source.get("type") == "text" else source.get("content")
    content = content_of(data) if isinstance(data, str | list) else _named(part)
    before = [text for text in (part.get("title"), part.get("context")) if isinstance(text, str) and text]
    return content._replace(text="\n\n".join([*before, content.text]))


def _named(part: Mapping[str, Any]) -> Content:
    """The name and size of a part without text; its address if it is somewhere else."""
    name = _NAMES[part["type"]]
    about = [part, *(value for value in part.values() if isinstance(value, dict))]
    data = [fields[key] for fields in about for key in _DATA if isinstance(fields.get(key), str)]
    labels = [fields[key] for fields in about for key in ("filename", "file_id") if isinstance(fields.get(key), str)]
    described = f"{name} {labels[0][:_LONGEST_ADDRESS]}" if labels else name
    for content in data:
        if content.startswith(("http:", "https:", "file:")):
            described += f", {content[:_LONGEST_ADDRESS]}"
        else:
            size = len(content.rpartition(",")[2]) * 3 // 4  # base64 has four characters for three bytes
            described += f", {size / 1000:,.0f} KB" if size >= 1000 else f", {size} bytes"
        break
    return Content(f"[{described}]", (described,))


def _texts(value: Any) -> Iterator[str]:
    """All texts in the known fields of a part of an unknown type."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        if value.get("type") in (*_NAMES, "tool_reference"):
            yield part_of(value, 0).text
        else:
            for name in _TEXTS:
                yield from _texts(value.get(name))


def require_text(question: Mapping[str, Content]) -> None:
    """Refuse a question that holds more than text. question: the contents of its message, by their places in the body.

    Raises `ApiError`.
    """
    for place, content in question.items():
        if content.unread:
            raise wrong(place, f"the model reads text alone, and this is a {content.unread[0]}; leave it out")


def note_of_unread(contents: Iterable[Content]) -> tuple[str, ...]:
    """A line for the answer's figures that names pictures and other parts without text; nothing if all parts are text."""
    names = [*dict.fromkeys(name for content in contents for name in content.unread)]
    if not names:
        return ()
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (f"named and not read, as the model reads text alone: {'; '.join(names[:_MOST_NAMED])}{more}",)
