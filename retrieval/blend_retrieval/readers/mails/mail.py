"""Mails: headers and text, and the attachments that can be read. `mail_text` reads the parts that are text."""

from __future__ import annotations

import mimetypes
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from email import policy
from email.header import decode_header, make_header
from email.headerregistry import HeaderRegistry
from email.message import EmailMessage, MIMEPart
from email.parser import BytesParser
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, NamedTuple, cast

from blend_retrieval.decoding import DecodingError, decode
from blend_retrieval.readers.base import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.mails.mail_text import PartText, attached_text, fuller_text, is_text_of_the_mail, part_text

_HEADERS = ("From", "Reply-To", "To", "Cc", "Bcc", "Date")
_ENVELOPES = ("application/pkcs7-mime", "application/x-pkcs7-mime")
_SIGNATURES = ("application/pgp-signature", "application/pkcs7-signature", "application/x-pkcs7-signature")
_OUTLOOK = ("application/ms-tnef", "application/vnd.ms-tnef")
_MESSAGES = ("message/rfc822", "message/global")
_REPORTS = ("message/delivery-status", "message/disposition-notification", "message/feedback-report")
_MOST_MAILS = 20  # inside each other
_MOST_PARTS = 20_000  # of a mail and the mails in it
_MOST_ASKED = 100  # parts of which each is asked for its charset
_LONGEST_HEADER = 16_000  # characters that the standard library's parser takes, whose time grows with their square
_LONGEST_KINDS = 400_000  # characters of all different ones, of which a second parses 30,000
_LONGEST_KIND = 2000  # characters of a header that says of what kind a part is
_PIECE = re.compile(rf".{{1,{_LONGEST_HEADER}}}(?:\s|\Z)|\S+", re.DOTALL)
_UNKNOWN = "\ufffd"
_UNREAD = {
    "image": "is a picture, which is not read",
    "audio": "is a recording, which is not read",
    "video": "is a recording, which is not read",
}
_ENCODINGS = ("", "7bit", "8bit", "binary", "quoted-printable", "base64", "x-uuencode", "uuencode", "uue", "x-uue")


class _Kinds(HeaderRegistry):
    """Parses the headers that say of what kind a part is, each once. Raises `UnreadableError` where they are too many."""

    def __init__(self) -> None:
        super().__init__()
        self._headers: dict[tuple[str, str], Any] = {}
        self._length = 0

    def __call__(self, name: str, value: str) -> Any:
        """The parsed header. No more than the begin of a long one is read."""
        if not name.lower().startswith("content-"):
            return super().__call__(name, value)
        key = (name, value[:_LONGEST_KIND])
        if key not in self._headers:
            self._length += len(key[1])
            if self._length > _LONGEST_KINDS:
                raise UnreadableError(
                    f"has more than {_LONGEST_KINDS:,} characters in the headers of its parts: divide it"
                )
            self._headers[key] = super().__call__(*key)
        return self._headers[key]


class _Parts:
    """Makes the parts of a mail for the parser, up to a number. Raises `UnreadableError` beyond it."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, policy: Any) -> EmailMessage:
        self._count += 1
        if self._count > _MOST_PARTS:
            raise UnreadableError(f"has more than {_MOST_PARTS:,} parts: divide it")
        return EmailMessage(policy=policy)


def _parsed(data: bytes, rules: Any) -> EmailMessage:
    factory: Any = _Parts()
    return cast("EmailMessage", BytesParser(factory, policy=rules).parsebytes(data))


class _Content(NamedTuple):
    """What a part of a mail holds. texts: in their order."""

    texts: list[PartText]
    attachments: list[MIMEPart]
    faults: list[Fault]


def read_eml(data: bytes, title: str) -> Parts:
    """Read a mail as one document under its subject, and each attachment as documents of its own."""
    rules = policy.EmailPolicy(header_factory=_Kinds())
    return _mail(_parsed(data, rules), title, 0)


def _mail(mail: MIMEPart, title: str, depth: int) -> Parts:
    """The documents of a mail. depth: the number of mails around it."""
    headers = [f"{name}: {value}" for name in _HEADERS if (value := _header(mail, name))]
    content = _content(mail, is_body=True)
    text = "\n\n".join(part.text.strip("\r\n") for part in content.texts if part.text.strip())
    whole = "\n".join([*headers, "", text])
    letter = Part("", _header(mail, "Subject") or title, whole, "plain")
    broken = [name for name in (*_HEADERS, "Subject") if _UNKNOWN in _header(mail, name)]
    parts: Parts = [
        letter,
        *(Fault(f"header {name}", "holds bytes of no known encoding", 0) for name in broken),
        *content.faults,
    ]
    names: set[str] = set()
    counts: Counter[str] = Counter()
    for number, attachment in enumerate(content.attachments, 1):
        name = _free_name(attachment.get_filename() or f"attachment {number}", names, counts)
        parts += _attached(attachment, name, depth)
    return parts


def _header(mail: MIMEPart, name: str) -> str:
    """A header's value, of all headers of this name. One that cannot be parsed comes as it is."""
    sources = [str(value) for key, value in mail.raw_items() if key.lower() == name.lower()]
    charset = "" if all(map(str.isascii, sources)) else _charset(mail)
    is_long = sum(map(len, sources)) > _LONGEST_HEADER
    values = [_value(name, source, charset, is_long=is_long) for source in sources]
    return ", ".join(" ".join(value.split()) for value in values if value.strip())


def _charset(mail: MIMEPart) -> str:
    """The charset of the first part that names one."""
    parts = islice(mail.walk(), _MOST_ASKED)
    return next(filter(None, (part.get_content_charset() for part in parts)), "")


def _value(name: str, source: str, charset: str, *, is_long: bool) -> str:
    with suppress(UnicodeError, DecodingError):  # bytes outside ASCII, which no standard allows
        source = decode(source.encode("ascii", "surrogateescape"), charset).text
    try:
        if is_long:
            return _long_value(source)
        return str(policy.default.header_factory(name, source))
    except Exception:  # the parser of headers raises any error
        return source


def _long_value(source: str) -> str:
    """A long header, piece by piece: the standard library's time grows with the square of the encoded words."""
    value = ""
    ended_encoded = False
    for piece in _PIECE.findall(source):
        begins_encoded = piece.lstrip().startswith("=?")
        between = "" if not value or (ended_encoded and begins_encoded) else " "
        value += between + str(make_header(decode_header(piece.strip())))
        ended_encoded = piece.rstrip().endswith("?=")
    return value


def _free_name(wanted: str, names: set[str], counts: Counter[str]) -> str:
    """A name that no other attachment has, now reserved. counts: how often each name was wanted."""
    path = PurePosixPath(wanted)
    name = wanted
    counts[wanted] += 1
    while name in names:
        counts[wanted] += name != wanted
        name = f"{path.stem} ({max(counts[wanted], 2)}){path.suffix}"
    names.add(name)
    return name


def _content(part: MIMEPart, *, is_body: bool = False) -> _Content:
    """The texts, attachments and faults of a part and all parts in it.

    is_body: whether a text in this place is that of the mail even if it has a file name.
    """
    kind = part.get_content_type()
    children = _children(part)
    if kind == "multipart/encrypted":
        return _Content([], [], [Fault("text", "is encrypted (PGP): save the mail decrypted")])
    if kind in _ENVELOPES:
        return _Content([], [], [Fault(part.get_filename() or "text", _envelope(part))])
    if kind == "multipart/alternative" and children:
        return _alternatives(children)
    if children:
        holds_body = is_body and kind == "multipart/related"
        return _together(_content(child, is_body=holds_body) for child in children)
    if kind in _REPORTS:
        return _Content([PartText(_report(part), is_plain=True)], [], [])
    if not is_text_of_the_mail(part, is_body=is_body):
        return _Content([], [part], [])
    if fault := _unknown_encoding(part):
        return _Content([], [], [Fault("text", fault)])
    text, faults = part_text(part)
    return _Content([text], [], faults)


def _children(part: MIMEPart) -> list[MIMEPart]:
    is_divided = part.is_multipart() and part.get_content_maintype() == "multipart"
    return cast("list[MIMEPart]", list(part.iter_parts())) if is_divided else []


def _together(contents: Iterable[_Content]) -> _Content:
    whole = _Content([], [], [])
    for content in contents:
        whole.texts.extend(content.texts)
        whole.attachments.extend(content.attachments)
        whole.faults.extend(content.faults)
    return whole


def _alternatives(children: list[MIMEPart]) -> _Content:
    """One text of several that should say the same, and the events and attachments of all."""
    contents = [_content(child, is_body=True) for child in children]
    whole = _together(contents)
    events = [text for text in whole.texts if text.is_event]
    versions = []
    for content in contents:
        texts = [text for text in content.texts if not text.is_event and text.text.strip()]
        if texts:
            words = "\n\n".join(text.text for text in texts)
            is_plain = all(text.is_plain for text in texts)
            versions.append(PartText(words, is_plain=is_plain))
    return whole._replace(texts=[*fuller_text(versions), *events])


def _envelope(part: MIMEPart) -> str:
    """Why an S/MIME part is not read."""
    kind = str(part.get_param("smime-type", "")).lower()
    if "signed" in kind:
        return "is signed in an S/MIME envelope, which is not opened: save the mail without its signature"
    if "compressed" in kind:
        return "is compressed in an S/MIME envelope, which is not opened"
    return "is encrypted (S/MIME): save the mail decrypted"


def _report(part: MIMEPart) -> str:
    """What a mail server reports, such as the recipients that a mail did not reach."""
    payload: Any = part.get_payload()
    blocks = payload if isinstance(payload, list) else [payload]
    return "\n\n".join(str(block).strip() for block in blocks)


def _unknown_encoding(part: MIMEPart) -> str:
    encoding = _header(part, "Content-Transfer-Encoding").lower()
    return "" if encoding in _ENCODINGS else f"is in a transfer encoding that is not read ({encoding})"


def _attached(attachment: MIMEPart, name: str, depth: int) -> Parts:
    """The documents of an attachment. depth: the number of mails around the one that it belongs to."""
    is_mail = attachment.get_content_type() in _MESSAGES
    if is_mail and depth >= _MOST_MAILS:
        parts: Parts = [Fault("", f"is a mail inside of more than {_MOST_MAILS} others: it is not read")]
    elif is_mail:
        parts = _mail(_forwarded(attachment), name, depth + 1)
    elif fault := _unknown_encoding(attachment):
        parts = [Fault("", fault)]
    else:
        parts = _read(attachment, name)
    return [_inside(part, name) for part in parts]


def _forwarded(attachment: MIMEPart) -> MIMEPart:
    """The mail in a mail. Some programs encode it in base64, which the parser takes for its text."""
    payload: Any = attachment.get_payload()
    mail: MIMEPart = payload[0] if isinstance(payload, list) else EmailMessage(policy=attachment.policy)
    if not mail.keys() and _header(attachment, "Content-Transfer-Encoding").lower() in ("base64", "quoted-printable"):
        mail["Content-Transfer-Encoding"] = _header(attachment, "Content-Transfer-Encoding")
        content: Any = mail.get_payload(decode=True)
        return _parsed(content, attachment.policy)
    return mail


def _read(attachment: MIMEPart, name: str) -> Parts:
    from blend_retrieval.readers import kind_of, reader_for

    if attachment.get_content_maintype() == "message":
        return [Fault("", "is only named in the mail, or is a piece of it: it is not read")]
    readers = [reader_for(suffix) for suffix in _suffixes(attachment, name)]
    if attachment.get_content_type() == "application/octet-stream" and kind_of(name) == "":
        readers.append(reader_for(""))
    reader = next(filter(None, readers), None)
    if reader is None:
        return [_unread(attachment, name)]
    try:
        return reader(attached_text(attachment), PurePosixPath(name).stem)
    except UnreadableError as error:
        return [Fault("", str(error))]


def _suffixes(attachment: MIMEPart, name: str) -> list[str]:
    """The suffixes that an attachment may have: that of its name, and those of its declared kind."""
    kind = attachment.get_content_type()
    suffixes = [PurePosixPath(name).suffix, mimetypes.guess_extension(kind) or ""]
    if kind.startswith("text/"):
        suffixes.append(".txt")
    return [suffix for suffix in suffixes if suffix]


def _unread(attachment: MIMEPart, name: str) -> Fault:
    kind = attachment.get_content_type()
    if kind in _OUTLOOK or name.lower() == "winmail.dat":
        return Fault("", "is in Outlook's own format (TNEF), which is not read: have it sent as HTML or plain text")
    if kind in _SIGNATURES:
        return Fault("", "is a signature, which is not checked", 0)
    return Fault("", _UNREAD.get(attachment.get_content_maintype(), "is an attachment of a kind that is not read"))


def _inside(part: Part | Fault, name: str) -> Part | Fault:
    if isinstance(part, Fault):
        return part._replace(where=f"{name} {part.where}".rstrip())
    inner = f"#{part.name}" if part.name else ""
    return part._replace(name=name + inner)
