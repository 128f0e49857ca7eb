"""Logs of all formats, the command's output, and its mistakes."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from logs import chat, message, words, write
from places import PYTHONPATH

from blend.census.census import Census
from blend.census.picture import draw
from blend.census.reading import LoggedRequest, LogReader
from blend.census.show import Findings
from blend.census.tokens import estimated
from blend.cli import blend
from blend_retrieval.installation import install_command
from tests.tiny_model import save_tiny_model

CALL = {"path": "a.py"}
SCHEMA = {"type": "object"}


def census(*arguments: str | Path) -> Result:
    return CliRunner().invoke(blend, ["census", *map(str, arguments)], standalone_mode=False)


def read(path: Path) -> LoggedRequest:
    with path.open("rb") as stream:
        [request] = LogReader().read(path.name, stream)
    return request


def test_three_formats_hold_the_same_texts(tmp_path):
    function = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": json.dumps(CALL)}}
    openai = chat(
        message("system", "Be brief."),
        message("user", [{"type": "text", "text": "Look."}]),
        message("assistant", "I read.", tool_calls=[call]),
        message("tool", "x = 1", tool_call_id="c1"),
        tools=[{"type": "function", "function": function}],
    )
    anthropic = chat(
        message("user", "Look."),
        message(
            "assistant", [{"type": "text", "text": "I read."}, {"type": "tool_use", "name": "read", "input": CALL}]
        ),
        message("user", [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "x = 1"}]}]),
        system=[{"type": "text", "text": "Be brief."}],
        tools=[{"name": "read", "description": "Reads.", "input_schema": SCHEMA}],
    )
    responses = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            message("user", [{"type": "input_text", "text": "Look."}]),
            message("assistant", [{"type": "output_text", "text": "I read."}]),
            {"type": "function_call", "call_id": "c1", "name": "read", "arguments": json.dumps(CALL)},
            {"type": "function_call_output", "call_id": "c1", "output": "x = 1"},
        ],
        "tools": [{"type": "function", **function}],
    }
    wrapped = {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": json.dumps(openai)}
    roles = ["system", "tools", "user", "assistant", "assistant", "tool"]
    for record in (openai, anthropic, responses, wrapped):
        found = read(write(tmp_path / "log", record)).segments
        assert [segment.role for segment in found] == roles
        texts = [segment.text for segment in found if segment.role != "tools"]
        assert [*texts[:3], texts[-1]] == ["Be brief.", "Look.", "I read.", "x = 1"]
        assert "a.py" in texts[3]


def test_a_session_names_the_source(tmp_path):
    body = chat(message("user", "a"), metadata={"user_id": "u7"})
    assert read(write(tmp_path / "log", {"request": body})).source == "u7"


def test_turns_times_and_parts_without_text(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    result = {"type": "tool_result", "content": [{"type": "image", "source": {}}, {"type": "text", "text": "done"}]}
    body = chat(
        message("user", [image, {"type": "text", "text": "Look."}]),
        message("assistant", None, tool_calls=[{"function": CALL}]),
        message("user", [result]),
        message("assistant", "It is a cat."),
        message("user", "And now?"),
    )
    request = read(write(tmp_path / "log", {"timestamp": "2026-01-02T00:00:00+00:00", "body": body}))
    assert (request.turn, request.images, request.seconds) == (3, 2, 1767312000)
    first = chat(message("system", "Be brief."), message("user", "Look."))
    for sent, seconds in (
        (1767312000, 1767312000),
        (1767312000500, 1767312000.5),
        (10**400, None),
        ("soon", None),
        (0, None),
    ):
        request = read(write(tmp_path / "log", {"created": sent, "body": first}))
        assert (request.turn, request.images, request.seconds) == (1, 0, seconds)


def conversations(tmp_path: Path) -> Path:
    """Two sessions, one of three turns; the first text of the other one changes."""
    records = []
    messages = []
    for turn in range(3):
        messages += [message("user", words(turn, 100)), message("assistant", words(10 + turn, 50))]
        records.append(chat(*messages[:-1], user="ann", created=1767312000 + 30 * turn))
    changed = words(0, 100).replace(words(0, 60).removeprefix(words(0, 50)), " edited " * 9)
    records.append(chat(message("user", [{"type": "image"}, {"type": "text", "text": changed}]), user="ben"))
    return write(tmp_path / "log.jsonl", *records)


def test_tables_by_turn_and_source_and_what_is_not_counted(tmp_path):
    out = tmp_path / "census.json"
    result = census(conversations(tmp_path), "--json", out, "--cache-tokens", "16")
    assert result.exception is None, result.output
    document = json.loads(out.read_text())
    assert list(document["by_turn"]) == ["1", "2", "3"]
    assert document["by_turn"]["2"] == {"prefix": 100, "shifted": 0, "near": 0, "new": 150}
    assert sum(document["by_source"]["ann"].values()) == 100 + 250 + 400
    assert document["by_source"]["ben"]["near"] > 0
    for name in ("by_turn", "by_source"):
        sums = [sum(row[kind] for row in document[name].values()) for kind in document["tokens"]]
        assert sums == list(document["tokens"].values())
    assert [request["turn"] for request in document["first_requests"]] == [1, 2, 3, 1]
    assert "1 part of messages without text not counted" in result.stdout
    (ann,) = (line for line in result.stdout.splitlines() if line.strip().startswith("ann"))
    assert "750" in ann
    assert "used again 1 requests later, after 30 s" in result.stdout


def test_many_sources_are_summed_up(tmp_path):
    records = [chat(message("user", words(number, 10 + number)), user=f"user {number:02}") for number in range(11)]
    shown = census(write(tmp_path / "log", *records)).stdout
    assert "user 10" in shown
    assert "user 02" not in shown
    (others,) = (line for line in shown.splitlines() if "3 other sources" in line)
    assert others.split()[3] == str(10 + 11 + 12)


def test_the_picture_shows_the_tokens_of_each_turn(tmp_path):
    pytest.importorskip("matplotlib")
    log = conversations(tmp_path)
    name = "$a^b$ 表.jsonl"
    log = log.rename(tmp_path / name)
    files = [tmp_path / "census.png", tmp_path / "census.svg", tmp_path / "again.svg"]
    for path in files:
        result = census(log, "--picture", path, "--rate", "100")
        assert result.exception is None, result.output
        assert f"wrote {path}" in " ".join(result.stderr.split())
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files[1].read_text()
    assert files[1].read_bytes() == files[2].read_bytes()

    reader, counts = LogReader(), Census(estimated, 10**8, 10**6)
    with log.open("rb") as stream:
        for request in reader.read(name, stream):
            counts.add(request)
    turns, ways = draw(Findings(counts, reader, name, "estimated", None)).axes
    heights = [[bar.get_height() * 1000 for bar in bars] for bars in turns.containers]
    expected = [list(row) for row in zip(*(counts.by_turn[turn].tolist() for turn in "123"), strict=True)]
    assert heights == [pytest.approx(row) for row in expected]
    assert [bar.get_width() * 1000 for bar in ways.patches] == pytest.approx([way.rows for way in counts.ways.values()])


def test_a_picture_that_cannot_be_written_ends_before_the_count(tmp_path, monkeypatch):
    log = write(tmp_path / "log", {"not": "a request"})
    assert "ends in .png or .svg" in str(census(log, "--picture", tmp_path / "x.jpg").exception)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = str(census(log, "--picture", tmp_path / "x.png").exception)
    assert refused == f"--picture draws pictures, which needs matplotlib: {install_command('report')}"
    out = tmp_path / "same.png"
    assert "name the same file" in str(census(log, "--json", out, "--picture", out).exception)


def test_the_command_reads_gzip_and_broken_lines_and_writes_all(tmp_path):
    log = write(tmp_path / "log.jsonl", *(chat(message("user", words(1, 60 * turn))) for turn in (1, 2)))
    packed = tmp_path / "more.jsonl.gz"
    packed.write_bytes(gzip.compress(log.read_bytes() + b'{"model": "m"}\n{broken\n'))
    out = tmp_path / "census.json"
    result = census(log, packed, "--rate", "1000", "--json", out)
    assert result.exception is None, result.output
    assert "log.jsonl and 1 more: 4 requests, 360 tokens" in result.stdout
    assert "2 lines without a request left out: more.jsonl.gz:3: no messages" in result.stdout
    document = json.loads(out.read_text())
    assert document["tokens"] == {"prefix": 60 + 60 + 120, "shifted": 0, "near": 0, "new": 120}
    assert {request["source"] for request in document["first_requests"]} == {"log.jsonl", "more.jsonl.gz"}
    assert document["ways"]["no cache"] == {"rows": 360, "seconds": pytest.approx(0.36)}
    assert document["skipped"]["lines"] == 2


def test_a_model_counts_and_is_timed(tmp_path):
    model = save_tiny_model(tmp_path / "tiny", words(1, 200))
    turns = [chat(message("user", words(1, count))) for count in (40, 80)]
    log = write(tmp_path / "log", *turns)
    result = census(log, "--model", model, "--dtype", "float32", "--json", tmp_path / "out.json")
    assert result.exception is None, result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert sum(document["tokens"].values()) > 120
    seconds = {name: way["seconds"] for name, way in document["ways"].items()}
    assert 0 < seconds["exact prefixes, no limit"] < seconds["no cache"]
    assert "measured here" in document["rates"]["words"]


def test_mistakes_end_in_one_line(tmp_path):
    empty = write(tmp_path / "empty", {"not": "a request"})
    assert "empty:1: no messages, input or prompt in it" in str(census(empty).exception)
    assert "is not there" in str(census(tmp_path / "gone").exception)
    assert "holds no model" in str(census(empty, "--model", tmp_path).exception)


def test_counting_loads_no_torch_and_opens_no_connection():
    """From standard input, with JSON on standard output."""
    code = """
import socket, sys
def refuse(*arguments): raise AssertionError("a connection")
socket.socket.connect = refuse
from blend.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {"torch", "transformers", "starlette", "httpx"} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", code, "census", "-", "--json", "-"]
    line = json.dumps(chat(message("user", "Hello there")))
    ended = subprocess.run(command, input=line, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["requests"] == 1
    assert "stdin: 1 request, 2 tokens" in ended.stderr
