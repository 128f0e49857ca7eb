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

from blend.census.reading import LoggedRequest, LogReader
from blend.cli import blend
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
