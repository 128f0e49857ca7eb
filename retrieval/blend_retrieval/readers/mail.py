"""Mails: headers and text, and the attachments that can be read."""

from __future__ import annotations

from email import message_from_bytes, policy
from email.message import MIMEPart
from pathlib import PurePosixPath
from typing import Any

from blend_retrieval.decoding import Decoded, decode
from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError, notes
from blend_retrieval.readers.html import html_to_markdown

_HEADERS = ("From", "To", "Cc", "Date")


def read_eml(data: bytes, title: str) -> Parts:
    """Read a mail as one document under its subject, and each attachment as documents of its own."""
    mail = message_from_bytes(data, policy=policy.default)
    headers = [f"{name}: {mail[name]}" for name in _HEADERS if mail[name]]
    body = mail.get_body(("plain", "html"))
    text, note = _text(body) if body is not None else ("", "")
    subject = str(mail["Subject"] or "").strip()
    whole = "\n".join([*headers, "", text])
    letter = Part("", subject or title, whole, "plain")
    parts: Parts = [letter, *notes(note)]
    for number, attachment in enumerate(mail.iter_attachments(), 1):
        name = attachment.get_filename() or f"attachment {number}"
        parts += _attached(attachment, name)
    return parts


def _text(body: MIMEPart) -> Decoded:
    payload: Any = body.get_payload(decode=True)
    content = decode(payload, body.get_content_charset(""))
    if body.get_content_subtype() != "html":
        return content
    _, markdown = html_to_markdown(content.text)
    return content._replace(text=markdown)


def _attached(attachment: MIMEPart, name: str) -> Parts:
    from blend_retrieval.readers import reader_for

    path = PurePosixPath(name)
    is_mail = attachment.get_content_type() == "message/rfc822"
    suffix = ".eml" if is_mail else path.suffix
    reader = reader_for(suffix)
    if reader is None:
        return [Fault(name, "is an attachment of a kind that is not read")]
    content: Any = attachment.get_payload(decode=True)
    if is_mail:
        content = attachment.get_content().as_bytes()
    try:
        parts = reader(content, path.stem)
    except UnreadableError as error:
        return [Fault(name, str(error))]
    return [_inside(part, name) for part in parts]


def _inside(part: Part | Fault, name: str) -> Part | Fault:
    if isinstance(part, Fault):
        return part._replace(where=f"{name} {part.where}".rstrip())
    inner = f"#{part.name}" if part.name else ""
    return part._replace(name=name + inner)
