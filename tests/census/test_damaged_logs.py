"""Logs that are damaged, huge, oddly packed or oddly encoded: no traceback, nothing left out without a word, bounded memory."""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from io import BufferedReader, BytesIO
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from logs import chat, count, message, tokens, words, write
from places import PYTHONPATH

from blend.census.lines import LONGEST_LINE
from blend.census.reading import LoggedRequest, LogReader
from blend.cli import blend

REQUESTS = 40
TEXTS = [words(number, 20) + " Müller \N{FIRE}" for number in range(REQUESTS)]
LOG = "".join(f"{json.dumps(chat(message('user', text)), ensure_ascii=False)}\n" for text in TEXTS)
PLAIN = LOG.encode()
PACKED = gzip.compress(PLAIN)
MEGABYTE = 1 << 20


def read(data: bytes) -> tuple[list[LoggedRequest], LogReader]:
    reader = LogReader()
    return list(reader.read("log", BufferedReader(BytesIO(data)))), reader


def texts(requests: list[LoggedRequest]) -> list[str]:
    return [segment.text for request in requests for segment in request.segments]


def census(*arguments: Path | str) -> Result:
    return CliRunner().invoke(blend, ["census", *map(str, arguments)], standalone_mode=False)


WHOLE = {
    "two members": (PACKED + PACKED, 2),
    "padding": (PACKED + b"\0" * 100_000, 1),
    "UTF-8 with a mark": (b"\xef\xbb\xbf" + PLAIN, 1),
    "two marks": (2 * (b"\xef\xbb\xbf" + PLAIN), 2),
    "packed UTF-16": (gzip.compress(LOG.encode("utf-16")), 1),
    "CR": (PLAIN.replace(b"\n", b"\r"), 1),
    "CR LF": (PLAIN.replace(b"\n", b"\r\n"), 1),
    "NULs in front": (bytes(3 * MEGABYTE) + PLAIN, 1),
    "no last line end": (PLAIN[:-1], 1),
    "a list": (b"[" + PLAIN[:-1].replace(b"\n", b", ") + b"]", 1),
    **{encoding: (LOG.encode(encoding), 1) for encoding in ("utf-16", "utf-16-le", "utf-16-be")},
    **{encoding: (LOG.encode(encoding), 1) for encoding in ("utf-32", "utf-32-le", "utf-32-be")},
}


@pytest.mark.parametrize(("data", "times"), WHOLE.values(), ids=WHOLE)
def test_each_request_is_read(data: bytes, times: int) -> None:
    requests, reader = read(data)
    assert texts(requests) == times * TEXTS
    assert (reader.skipped, reader.unread) == (0, [])


def broken(data: bytes, place: int, by: bytes) -> bytes:
    return data[:place] + by + data[place + len(by) :]


# The log, at least how many of its requests are read, and why the others are not.
ENDED = {
    "cut": (PACKED[:-30], REQUESTS - 5, "is cut short: the gzip file ends at byte"),
    "cut in its head": (PACKED[:5], 0, "is cut short: the gzip file ends at byte 5"),
    "changed": (broken(PACKED, len(PACKED) - 300, b"\xff" * 8), REQUESTS // 2, "is damaged at about byte"),
    "changed sum": (broken(PACKED, len(PACKED) - 8, b"\xff\xff"), REQUESTS, "is damaged at about byte"),
    "followed by others": (PACKED + b"else", REQUESTS, f"holds other data than gzip from byte {len(PACKED):,} on"),
    "no gzip": (b"\x1f\x8b\xff" + PLAIN, 0, "is damaged at about byte 0"),
    "packed twice": (gzip.compress(PACKED), 0, "is packed twice; pipe it: zcat log | zcat | blend census -"),
    "bzip2": (bz2.compress(PLAIN), 0, "is packed with bzip2; pipe it: bzcat log | blend census -"),
    "xz": (lzma.compress(PLAIN), 0, "is packed with xz; pipe it: xzcat log | blend census -"),
    "zstd": (b"\x28\xb5\x2f\xfd" + PLAIN, 0, "is packed with zstd; pipe it: zstdcat log | blend census -"),
    "binary": (bytes(range(256)) * 9, 0, "is a binary file, no log"),
}


@pytest.mark.parametrize(("data", "least", "why"), ENDED.values(), ids=ENDED)
def test_a_log_that_is_not_read_to_its_end_says_so(data: bytes, least: int, why: str) -> None:
    requests, reader = read(data)
    assert texts(requests)[:least] == TEXTS[:least]
    [problem] = reader.unread
    assert problem.startswith(f"log {why}")


def deep(opening: str, closing: str, depth: int) -> str:
    return f'{{"messages": [{{"role": "user", "content": {opening * depth}"x"{closing * depth}}}]}}'


SKIPPED = {
    "nested": (deep("[", "]", 100_000), "nested too deeply"),
    "nested for us": (deep("[", "]", 990), "nested too deeply"),
    "nested in a text": (json.dumps({"body": deep("[", "]", 100_000)}), "nested too deeply"),
    "objects in tools": (
        f'{{"messages": [{{"content": "x"}}], "tools": [{"{" + chr(34) + "a" + chr(34) + ":"}{"[" * 990}{"]" * 990}}}]}}',
        "nested too deeply",
    ),
    "digits": (
        f'{{"created": {"9" * 5000}, "messages": [{{"content": "x"}}]}}',
        "an integer of thousands of digits in it",
    ),
    "NUL": ('{"messages":\0[]}', "no JSON"),
    "Latin-1": ('{"messages": [{"content": "M\udcfcller"}]}', "not UTF-8 at its byte 29"),
    "many messages": (
        json.dumps({"messages": [{"content": "x"}] * 100_001}),
        "100,001 texts of 100,001 characters, at most 100,000 of 8,388,608 are counted",
    ),
    "many objects": (
        f'{{"messages": [{"{}," * 400_000}{{}}]}}',
        "more than 400,000 objects and lists in a line of 1,200,",
    ),
    "much text": (json.dumps(chat(message("user", "word " * 1_700_000))), "1 text of 8,500,000 characters, at most"),
    "in a list": (f"[{json.dumps(chat(message('user', 'Hello')))}, {{}}]", "no messages, input or prompt in it"),
}


@pytest.mark.parametrize(("line", "why"), SKIPPED.values(), ids=SKIPPED)
def test_a_line_that_is_not_read_is_counted_and_named(line: str, why: str) -> None:
    requests, reader = read(PLAIN + line.encode("utf-8", "surrogateescape") + b"\n" + PLAIN)
    assert [text for text in texts(requests) if text != "Hello"] == 2 * TEXTS
    assert reader.skipped == 1
    [named] = reader.named
    element = "[1]" if line.startswith("[") else ""
    assert named.startswith(f"log:{REQUESTS + 1}{element}: {why}")


def test_odd_values_are_read_as_every_server_reads_them() -> None:
    lines = (
        '{"created": 1e999, "messages": [{"content": "a"}], "tools": [{"n": 1e999}]}',
        '{"created": "0001-01-01", "messages": [{"content": "b"}]}',
        '{"messages": [], "messages": [{"content": "of two keys the last"}]}',
        '{"user": "\\ud800", "messages": [{"content": "half \\udfff"}]}',
    )
    requests, reader = read("\n".join(lines).encode())
    assert [request.segments[0].text for request in requests] == [
        '{"n": Infinity}',
        "b",
        "of two keys the last",
        "half \udfff",
    ]
    assert [request.seconds for request in requests] == [None] * 4
    assert (reader.skipped, reader.unread) == (0, [])


def test_half_a_character_in_names_and_texts_is_shown_and_written(tmp_path: Path) -> None:
    records = [chat(message("user", f"{words(1, 40)} \udfff {number}"), user="\ud800") for number in range(2)]
    result = census(write(tmp_path / "log", *records), "--json", tmp_path / "out.json")
    assert result.exception is None, result.output
    assert json.loads((tmp_path / "out.json").read_text())["requests"] == 2


def test_what_is_not_read_stands_below_the_tables_and_in_json(tmp_path: Path) -> None:
    log = tmp_path / "log.gz"
    log.write_bytes(PACKED[:-30])
    other = tmp_path / "binary"
    other.write_bytes(os.urandom(10_000))
    result = census(log, other, "--json", tmp_path / "out.json")
    assert result.exception is None, result.output
    shown = " ".join(result.stdout.split())
    assert "not read to its end: log.gz is cut short: the gzip file ends at byte" in shown
    assert "not read to its end: binary is a binary file, no log" in shown
    assert len(json.loads((tmp_path / "out.json").read_text())["unread"]) == 2


def test_what_can_be_no_log_ends_before_the_count(tmp_path: Path) -> None:
    log = write(tmp_path / "log", chat(message("user", "Hello")))
    (tmp_path / "log.xz").write_bytes(lzma.compress(PLAIN))
    closed = write(tmp_path / "closed")
    closed.chmod(0)
    refused = {tmp_path: "is a folder", tmp_path / "log.xz": f"xzcat {tmp_path}/log.xz | blend census -"}
    if not os.access(closed, os.R_OK):  # root reads all
        refused[closed] = "chmod u+r"
    for path, why in refused.items():
        assert why in str(census(log, path).exception)
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps([chat(message("user", "Hello"))], indent=1))
    assert "jq -c '.[]' LOG | blend census -" in str(census(whole).exception)


def test_a_log_that_becomes_shorter_while_it_is_read_says_so(tmp_path: Path) -> None:
    reader = LogReader()
    path = tmp_path / "log"
    path.write_bytes(40 * MEGABYTE * b" " + b"\n" + PLAIN)
    with path.open("rb") as stream:
        path.write_bytes(PLAIN)
        stream.seek(len(PLAIN) + 1)
        requests = list(reader.read("log", stream))
    assert requests == []
    assert reader.unread == [f"log was cut to {len(PLAIN):,} bytes while it was read, behind byte 0"]


def test_a_log_that_grows_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "log", *(chat(message("user", text)) for text in TEXTS))
    reader = LogReader()
    with path.open("rb") as stream, path.open("ab") as writer:
        requests = reader.read("log", stream)
        first = next(requests)
        for _ in range(3):
            writer.write(PLAIN)
        writer.write(b'{"messages": [{"content": "half a')
        writer.flush()
        assert texts([first, *requests]) == 4 * TEXTS
    assert reader.named == [f"log:{4 * REQUESTS + 1}: no JSON"]


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(PACKED,))
    writer.start()
    result = census(pipe)
    writer.join()
    assert result.exception is None, result.output
    assert f"pipe: {REQUESTS} requests" in result.stdout


def test_a_bomb_of_empty_lines_is_counted() -> None:
    requests, reader = read(gzip.compress(20 * MEGABYTE * b"\n" + b"{}\n" + PLAIN, 1))
    assert len(requests) == REQUESTS
    assert reader.named == [f"log:{20 * MEGABYTE + 1}: no messages, input or prompt in it"]


def count_in_process(path: Path) -> tuple[str, int]:
    """What the command says of a log, and its most memory in MB."""
    code = """
from pathlib import Path
from blend.cli import main
try:
    main()
except SystemExit:
    [most] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print("kB", most.split()[1])
"""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", code, "census", str(path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return " ".join(ended.stdout.split()), int(ended.stdout.rsplit("kB ", 1)[1]) // 1024


LONG = {
    "plain": (lambda data: data, [b'{"prompt": "', b"word " * 12_000_000, b'"}\n'], 60_000_014),
    "packed": (lambda data: gzip.compress(data, 1), [100 * MEGABYTE * b"x", b"\n"], 100 * MEGABYTE),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(("pack", "line", "nbytes"), LONG.values(), ids=LONG)
def test_a_long_line_takes_no_memory(
    tmp_path: Path, pack: Callable[[bytes], bytes], line: list[bytes], nbytes: int
) -> None:
    (tmp_path / "log").write_bytes(pack(b"".join([*line, PLAIN])))
    said, megabytes = count_in_process(tmp_path / "log")
    assert f"{REQUESTS} requests" in said
    assert f"log:1: {nbytes:,} bytes in one line, at most {LONGEST_LINE:,} are read" in said
    assert megabytes < 120


def test_long_texts_count_as_short_ones_do(tmp_path: Path) -> None:
    """They are divided into tokens, and into blocks of the prefix cache, in slices."""
    text = " ".join(words(number, 4000) for number in range(70))  # 2.2 MB
    census = count(tmp_path, chat(message("user", text)), chat(message("user", text + " more")))
    assert tokens(census, 0)["new"] == 70 * 4000
    assert tokens(census, 1) == {"prefix": 70 * 4000, "shifted": 0, "near": 0, "new": 1}
