"""Where a request ends is never in doubt: what proxies and servers read differently is refused, and its connection closed."""

import json
import random
from http.client import HTTPResponse
from typing import Any

import h11
import pytest
from served import CHAT, USER, Served

from blend.serve.http.errors import ApiError
from blend.serve.http.framing import RequestReader

HOST = b"Host: localhost\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def post(*fields: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    head = b"\r\n".join([b"POST /v1/embeddings HTTP/" + version, b"Host: localhost", *fields])
    return head + b"\r\n\r\n" + body


def chunked(body: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", body=body)


def answers(served: Served, raw: bytes) -> list[tuple[int, Any]]:
    """The status and the document of each answer until the server closes the connection."""
    with served.connected() as connection:
        connection.sendall(raw)
        reply = b"".join(iter(lambda: connection.recv(100_000), b""))
    replies = list[tuple[int, Any]]()
    while reply:
        head, _, behind = reply.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        assert fields[b"content-type"] == b"application/json"
        length = int(fields[b"content-length"])
        replies.append((int(head.split()[1]), json.loads(behind[:length])))
        reply = behind[length:]
    return replies


LENGTHS = [b"+5", b"-5", b"0x5", b"5 5", b"5, 5", b"5_0", b"", b"\xd9\xa5", b"5.", b"9" * 30]
CODINGS = [b"identity", b"gzip, chunked", b"chunked, identity", b"xchunked", b"chunked;q=1", b'"chunked"', b""]
REFUSED_HEADS = {
    "length and coding": post(b"Content-Length: 0", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n"),
    "two equal lengths": post(b"Content-Length: 0", b"Content-Length: 0"),
    "two lengths": post(b"Content-Length: 0", b"Content-Length: 5"),
    "two codings": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "coding in HTTP/1.0": post(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n", version=b"1.0"),
    "control character": post(b"Transfer-Encoding: \x0bchunked"),
    "zero byte": post(b"Transfer-Encoding: chunked\x00"),
    "space before the colon": post(b"Content-Length : 0"),
    "space before the name": post(b" Content-Length: 0"),
    "folded": post(b"Transfer-Encoding:\r\n chunked"),
    "bare line feeds": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "a bare line feed": b"GET /health HTTP/1.1\r\nHost: localhost\nContent-Length: 0\r\n\r\n",
    "a bare return": post(b"A: b\rContent-Length: 5"),
    "no colon": post(b"Content-Length"),
    "no name": post(b": 5"),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "small letters": b"GET /health http/1.1\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in the target": b"GET /health /v1/models HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "no path": b"GET health HTTP/1.1\r\n" + HOST + b"\r\n",
    "user in the target": b"GET http://localhost@evil.example/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "another scheme": b"GET file:///etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
    **{f"length {length!r}": post(b"Content-Length: " + length) for length in LENGTHS},
}
OTHER_REFUSALS = {
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/1.2": (b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n", 505),
    "CONNECT": (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "TRACE": (b"TRACE /health HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "many headers": (post(*[b"A: b"] * 200), 431),
    "long headers": (post(b"A: " + b"b" * 70_000), 431),
    "a long line": (b"GET /" + b"a" * 70_000, 431),
    **{f"coding {coding!r}": (post(b"Transfer-Encoding: " + coding, body=b"0\r\n\r\n"), 501) for coding in CODINGS},
}
HEADS = {name: (raw, 400) for name, raw in REFUSED_HEADS.items()} | OTHER_REFUSALS


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_could_be_read_in_two_ways_are_refused(served: Served, name: str) -> None:
    raw, status = HEADS[name]
    [(answered, document)] = answers(served, raw + SMUGGLED)
    assert answered == status
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["code"] in ("invalid_http", "head_too_large", "method_not_allowed")


REFUSED_CHUNKS = {
    "hexadecimal": b"0x1\r\nX\r\n0\r\n\r\n",
    "sign": b"+1\r\nX\r\n0\r\n\r\n",
    "negative": b"-1\r\nX\r\n0\r\n\r\n",
    "space before": b" 1\r\nX\r\n0\r\n\r\n",
    "space behind": b"1 \r\nX\r\n0\r\n\r\n",
    "no size": b"\r\nX\r\n0\r\n\r\n",
    "line feed": b"1\nX\r\n0\r\n\r\n",
    "no digit": b"g\r\nX\r\n0\r\n\r\n",
    "wraps at 64 bits": b"10000000000000001\r\nX\r\n0\r\n\r\n",
    "longer than said": b"1\r\nXY\r\n0\r\n\r\n",
    "line feed behind": b"1\r\nX\n0\r\n\r\n",
    "nothing behind": b"1\r\nX0\r\n\r\n",
    "line feed in an extension": b"1;a\nb\r\nX\r\n0\r\n\r\n",
    "long extension": b"1;" + b"a" * 300 + b"\r\nX\r\n0\r\n\r\n",
    "endless extension": b"1;" + b"a" * 100_000,
    "many extensions": (b"1;" + b"a" * 250 + b"\r\nX\r\n") * 300 + b"0\r\n\r\n",
    "long trailer": b"0\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
    "endless trailer": b"0\r\n" + b"a" * 20_000,
    "line feed in the trailer": b"0\r\na: b\n\r\n\r\n",
    "trailer without a colon": b"0\r\nGET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED_CHUNKS)
def test_chunks_that_could_be_read_in_two_ways_are_refused(served: Served, name: str) -> None:
    [(status, document)] = answers(served, chunked(REFUSED_CHUNKS[name]) + SMUGGLED)
    assert (status, document["error"]["code"]) == (400, "invalid_http")


RIGHT = {
    "body of a GET": (
        b"GET /health HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
        [200],
    ),
    "chunks of a GET": (
        b"GET /health HTTP/1.1\r\n"
        + HOST
        + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED),
        [200],
    ),
    "capitals": (post(b"TRANSFER-ENCODING: Chunked", body=b"1\r\n{\r\n0\r\n\r\n"), [400]),
    "extensions and trailers": (chunked(b'1;a="b"\r\n{\r\n0;last\r\nContent-Length: 500\r\nHost: evil\r\n\r\n'), [400]),
    "underscores": (post(b"Content-Length: 1", b"Content_Length: 50", b"Transfer_Encoding: chunked", body=b"{"), [400]),
    "absolute": (b"GET http://localhost/health HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "absolute without a path": (b"OPTIONS HTTP://localhost?a=b HTTP/1.1\r\n" + HOST + b"\r\n", [405]),
    "absolute, of another host": (b"GET http://evil.example/v1/models HTTP/1.1\r\n" + HOST + b"\r\n", [403]),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "empty line before": (b"\r\nGET /health HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "upgrade": (b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", [200]),
    "several": (LAST.replace(b"Connection: close\r\n", b"") * 3, [200] * 3),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_clear_is_answered_and_so_is_the_request_behind_it(served: Served, name: str) -> None:
    raw, statuses = RIGHT[name]
    replies = answers(served, raw + LAST)
    assert [status for status, _ in replies] == [*statuses, 200]
    assert replies[-1][1] == {"status": "ok"}


def test_http_1_0_is_answered_and_its_connection_closed(served: Served) -> None:
    assert answers(served, b"GET /health HTTP/1.0\r\n\r\n" + SMUGGLED) == [(200, {"status": "ok"})]


def test_a_question_in_chunks_that_waits_for_a_sign(served: Served) -> None:
    body = json.dumps({"messages": USER, "max_tokens": 1}).encode()
    with served.connected() as connection:
        fields = b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode() + fields)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"".join(b"1;x\r\n%c\r\n" % byte for byte in body) + b"0\r\nDigest: none\r\n\r\n")
        reply = HTTPResponse(connection)
        reply.begin()
        assert (reply.status, json.loads(reply.read())["usage"]["completion_tokens"]) == (200, 1)


def test_what_is_refused_has_the_form_of_its_protocol(served: Served) -> None:
    [(status, document)] = answers(
        served, b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: +1\r\n\r\n"
    )
    assert status == 400
    assert (document["type"], document["error"]["type"]) == ("error", "invalid_request_error")


def pieces(raw: bytes, random_: random.Random) -> list[bytes]:
    """These bytes, cut anywhere."""
    ends = sorted(random_.randrange(len(raw)) for _ in range(random_.choice((0, 3, len(raw)))))
    return [raw[begin:end] for begin, end in zip([0, *ends], [*ends, len(raw)], strict=True)]


def in_chunks(body: bytes, random_: random.Random) -> bytes:
    raw = bytearray()
    while body:
        size = min(len(body), random_.choice((1, 2, 15, 16, 300)))
        extension = random_.choice((b"", b";a", b'; a="b\xff"'))
        raw += random_.choice((b"%x", b"%X", b"%05x")) % size + extension + b"\r\n" + body[:size] + b"\r\n"
        body = body[size:]
    return bytes(raw) + random_.choice((b"0\r\n\r\n", b"00;z\r\nA: b\r\nC:\r\n\r\n"))


@pytest.mark.parametrize("seed", range(40))
def test_bodies_are_those_that_the_library_reads(seed: int) -> None:
    """However they are cut into chunks and reads, and whatever follows them."""
    random_ = random.Random(seed)
    body = random_.choice((b"", random_.randbytes(2000), b"\r\n0\r\n\r\n" * 100))
    raw = chunked(in_chunks(body, random_)) + SMUGGLED
    library = h11.Connection(h11.SERVER)
    reader = RequestReader()
    heads = 0
    for piece in pieces(raw, random_):
        reader.add(piece)
        while not heads or reader.in_body:
            if not reader.in_body:
                head = reader.head()
                if head is None:
                    break
                heads += 1
                library.receive_data(head.raw)
            else:
                if part := reader.body_part():
                    library.receive_data(part)
                if reader.in_body and not reader.has_more:
                    break
    read = bytearray()
    while not isinstance(event := library.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA
        read += event.data if isinstance(event, h11.Data) else b""
    alone = h11.Connection(h11.SERVER)
    alone.receive_data(raw)
    expected = bytearray()
    while not isinstance(event := alone.next_event(), h11.EndOfMessage):
        expected += event.data if isinstance(event, h11.Data) else b""
    assert read == expected == body
    following = reader.head()
    assert following is not None
    assert following.raw == SMUGGLED


def test_one_step_reads_a_bounded_number_of_chunks() -> None:
    reader = RequestReader()
    reader.add(chunked(b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n"))
    assert reader.head() is not None
    steps = 0
    while reader.in_body:
        assert len(reader.body_part()) < 1000
        assert reader.in_pieces or not reader.in_body
        steps += 1
    assert steps == 20


def test_a_head_that_ends_late_is_not_searched_anew() -> None:
    reader = RequestReader()
    for byte in post(b"Content-Length: 2")[:-1]:
        reader.add(bytes([byte]))
        assert reader.head() is None
    reader.add(b"\n{}")
    head = reader.head()
    assert head is not None
    assert (head.path, head.length, reader.body_part()) == ("/v1/embeddings", 2, b"{}")
    reader.add(b"GET / HTTP/1.1\r")
    assert reader.head() is None
    reader.add(b"Host: localhost")
    reader.add(b"\n\r\n\r\n")
    with pytest.raises(ApiError):
        reader.head()
