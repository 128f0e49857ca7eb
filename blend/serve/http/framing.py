"""Where a request's head and body end, read strictly: no proxy in front can read another request into the same bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from blend.serve.http.errors import ApiError, refuse

_LONGEST_HEAD = 1 << 16  # bytes of a request line and its headers
_MOST_FIELDS = 128
_LONGEST_TRAILER = 1 << 13  # bytes behind the last chunk
_LONGEST_EXTENSION = 256  # bytes of one chunk's
_MOST_EXTENSIONS = 1 << 16  # bytes of a body's
_MOST_CHUNKS = 512  # that one step decodes
_PIECE = 1 << 12  # bytes; a body whose reads bring less comes in pieces
_MOST_PIECES = 16  # of a body that is not in pieces

_HEAD_END = b"\r\n\r\n"
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/([0-9]\.[0-9])" % _TOKEN)
_FIELD = re.compile(rb"(%s):[ \t]*([\t\x20-\x7e\x80-\xff]*)" % _TOKEN)
_FIRST_BYTES = re.compile(rb"(?:[A-Za-z]{1,32}(?: |\Z)|\r?\Z)")
_BEGIN = re.compile(rb"(?:\r\n)?%s (/[^ ?]{0,64})?" % _TOKEN)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/[^#]*|\?[^#]*)?", re.IGNORECASE)
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(;[\t\x20-\x7e\x80-\xff]{0,%d})?\r\n" % _LONGEST_EXTENSION)
_CHUNK_LINE_BEGUN = re.compile(rb"[0-9A-Fa-f]{1,15}(;[\t\x20-\x7e\x80-\xff]{0,%d})?\r?" % _LONGEST_EXTENSION)


def invalid(message: str, status: int = 400) -> ApiError:
    """A request that is no valid HTTP; its connection is closed, since its end is unknown."""
    return refuse(message, None, "invalid_http", status).and_close()


def _too_large(message: str) -> ApiError:
    return refuse(message, None, "head_too_large", 431).and_close()


@dataclass(frozen=True)
class RequestHead:
    """A request's head.

    Attributes:
        raw: the head as the HTTP library gets it, with a path for its target.
        path: what the request asks for.
        length: bytes of its body; None for a body in chunks.

    """

    raw: bytes
    path: str
    length: int | None


def _head_of(lines: list[bytes]) -> RequestHead:
    request_line = _REQUEST_LINE.fullmatch(lines[0])
    if request_line is None:
        raise invalid("the request line is not METHOD TARGET HTTP/1.1")
    method, target, version = request_line.groups()
    if version not in (b"1.0", b"1.1"):
        raise invalid("the server speaks HTTP/1.1 and HTTP/1.0", 505)
    if method in (b"CONNECT", b"TRACE"):
        raise refuse(f"{method.decode()} is for proxies", None, "method_not_allowed", 405).and_close()
    if len(lines) - 1 > _MOST_FIELDS:
        raise _too_large(f"the request has more than {_MOST_FIELDS} headers")
    fields = [_field_of(line) for line in lines[1:]]
    length = _length_of(fields, version)
    if not target.startswith(b"/") and target != b"*":
        target, fields = _without_authority(target, fields)
    head = [b"%s %s HTTP/%s" % (method, target, version), *(b"%s: %s" % field for field in fields)]
    return RequestHead(b"\r\n".join(head) + _HEAD_END, target.decode().partition("?")[0], length)


def _field_of(line: bytes) -> tuple[bytes, bytes]:
    field = _FIELD.fullmatch(line)
    if field is None:
        raise invalid("a header is not NAME: VALUE on one line")
    return field[1], field[2].strip(b" \t")


def _length_of(fields: list[tuple[bytes, bytes]], version: bytes) -> int | None:
    """The length of the body, None for chunks. What could be read in two ways is refused: it can smuggle a request."""
    lengths = [value for name, value in fields if name.lower() == b"content-length"]
    codings = [value for name, value in fields if name.lower() == b"transfer-encoding"]
    hosts = [value for name, value in fields if name.lower() == b"host"]
    if len(hosts) > 1 or (not hosts and version == b"1.1"):
        raise invalid("the request needs one Host header")
    if len(lengths) + len(codings) > 1:
        raise invalid("the request may have one header that ends its body: Content-Length or Transfer-Encoding")
    if codings:
        if version == b"1.0":
            raise invalid("HTTP/1.0 has no Transfer-Encoding")
        if codings[0].lower() != b"chunked":
            raise invalid("the only Transfer-Encoding that the server reads is chunked", 501)
        return None
    if not lengths:
        return 0
    if not _LENGTH.fullmatch(lengths[0]):
        raise invalid("Content-Length is not a number of bytes")
    return int(lengths[0])


def _without_authority(target: bytes, fields: list[tuple[bytes, bytes]]) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The path of an absolute target, and the headers with the target's host, which overrides the header."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise invalid("the request's target is not a path")
    path = absolute[2] or b"/"
    if path.startswith(b"?"):
        path = b"/" + path
    without_host = [field for field in fields if field[0].lower() != b"host"]
    return path, [(b"Host", absolute[1]), *without_host]


class LengthBody:
    """A body of so many bytes."""

    def __init__(self, length: int) -> None:
        self._missing = length

    @property
    def ended(self) -> bool:
        """Whether all of it has come."""
        return not self._missing

    def take(self, incoming: bytearray) -> bytes:
        """Remove its bytes from the front."""
        content = bytes(incoming[: self._missing])
        del incoming[: len(content)]
        self._missing -= len(content)
        return content


class ChunkedBody:
    """A body in chunks; those that have come together become one, so that many small ones cost no more than their bytes."""

    def __init__(self) -> None:
        self.ended = False
        self.has_more = False
        self._missing = 0  # bytes of the chunk that has begun, with its CR LF
        self._extensions = 0
        self._in_trailer = False

    def take(self, incoming: bytearray) -> bytes:
        """Remove chunks from the front; returns them as one chunk, and the last one when all have come.

        One call takes at most 512; `has_more` says that it stopped there. Raises `ApiError` for what are no chunks.
        """
        pieces = list[bytes]()
        at = 0
        view = bytes(incoming)
        self.has_more = False
        while not self._in_trailer:
            if len(pieces) == _MOST_CHUNKS:
                self.has_more = True
                break
            end, piece = self._chunk(view, at)
            if end == at:
                break
            at = end
            if piece:
                pieces.append(piece)
        del incoming[:at]
        content = b"".join(pieces)
        chunk = b"%x\r\n%s\r\n" % (len(content), content) if content else b""
        if self._in_trailer and self._take_trailer(incoming):
            self.ended = True
            chunk += b"0\r\n\r\n"
        return chunk

    def _chunk(self, view: bytes, at: int) -> tuple[int, bytes]:
        """Where the chunk at this place ends as far as it has come, and what it adds to the body."""
        if not self._missing:
            line = _CHUNK_LINE.match(view, at)
            if line is None:
                if at < len(view) and not _CHUNK_LINE_BEGUN.fullmatch(view, at):
                    raise invalid("the body's chunks are not valid")
                return at, b""
            size = int(line[1], 16)
            self._extensions += len(line[2] or b"")
            if self._extensions > _MOST_EXTENSIONS:
                raise invalid("the extensions of the body's chunks are too long")
            at = line.end()
            if not size:
                self._in_trailer = True
                return at, b""
            self._missing = size + len(b"\r\n")
        end_before = max(0, 2 - self._missing)  # bytes of its CR LF that have come
        end = min(len(view), at + self._missing)
        self._missing -= end - at
        line_end = b"\r\n"[end_before : max(0, 2 - self._missing)]
        content_end = end - len(line_end)
        if view[content_end:end] != line_end:
            raise invalid("a chunk of the body does not end with CR LF")
        return end, view[at:content_end]

    def _take_trailer(self, incoming: bytearray) -> bool:
        """Remove the headers behind the last chunk, which have no effect; whether all have come."""
        if incoming.startswith(b"\r\n"):
            del incoming[:2]
            return True
        end = incoming.find(_HEAD_END)
        size = len(incoming) if end < 0 else end
        if size > _LONGEST_TRAILER or _BARE_LINE_FEED.search(incoming, 0, size):
            raise invalid("what follows the body's last chunk is not valid")
        if end < 0:
            return False
        for line in bytes(incoming[:end]).split(b"\r\n"):
            _field_of(line)
        del incoming[: end + len(_HEAD_END)]
        return True


class RequestReader:
    """Cuts the bytes of a connection into heads and bodies of requests."""

    def __init__(self) -> None:
        self._incoming = bytearray()
        self._searched = 0  # bytes in which there is no head's end
        self._body: LengthBody | ChunkedBody | None = None
        self._pieces = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a further request has come."""
        return not self._incoming and self._body is None

    @property
    def in_body(self) -> bool:
        """Whether a body has begun and not ended."""
        return self._body is not None

    @property
    def in_pieces(self) -> bool:
        """Whether the body comes in many small pieces, each of which costs time."""
        return self.has_more or self._pieces > _MOST_PIECES

    @property
    def has_more(self) -> bool:
        """Whether another part of the body has come already."""
        return isinstance(self._body, ChunkedBody) and self._body.has_more

    @property
    def path(self) -> str:
        """The path for which the next request seems to ask, "" if that is not clear."""
        begin = _BEGIN.match(self._incoming)
        return (begin[1] or b"").decode("latin-1") if begin else ""

    def add(self, data: bytes) -> None:
        """Take bytes of the connection."""
        if self._body is not None and len(data) < _PIECE:
            self._pieces += 1
        self._incoming += data

    def head(self) -> RequestHead | None:
        """The next head, None if its end has not come. Its body follows.

        Raises `ApiError` for a head that is not valid, or one that servers and proxies read differently.
        """
        incoming = self._incoming
        if incoming.startswith(b"\r\n"):
            del incoming[:2]  # some clients end a body with a line of its own
        if not _FIRST_BYTES.match(incoming):
            raise invalid("the request is not HTTP")
        begin = max(0, self._searched - len(_HEAD_END))
        end = incoming.find(_HEAD_END, begin)
        size = len(incoming) if end < 0 else end
        if _BARE_LINE_FEED.search(incoming, begin, size):
            raise invalid("a line of the request's head does not end with CR LF")
        if size > _LONGEST_HEAD:
            raise _too_large(f"the request's head is larger than {_LONGEST_HEAD:,} bytes")
        if end < 0:
            self._searched = size
            return None
        head = _head_of(bytes(incoming[:end]).split(b"\r\n"))
        del incoming[: end + len(_HEAD_END)]
        self._searched = self._pieces = 0
        if head.length != 0:
            self._body = ChunkedBody() if head.length is None else LengthBody(head.length)
        return head

    def body_part(self) -> bytes:
        """The next part of the body as it may be passed on. Raises `ApiError` for chunks that are none."""
        assert self._body is not None
        part = self._body.take(self._incoming)
        if self._body.ended:
            self._body = None
        return part
