"""npm's clients of the Messages API against `blend serve` with a small model that follows a script: an agent and an SDK."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from claude_code import FOLDER, INSTALL, KEY, MODEL, Server, converse, turns_of
from example_server import environment, serving, until
from places import REPOSITORY

from tests.scripted_model import call, save_scripted_model

WORDS = ("harbour", "orchard")
TEXTS = ("I ask the shell for a word.", "Now another please:", "It said harbour and orchard, so we are done!")
CALLS = [call("Bash", json.dumps({"command": f"echo {word}", "description": f"Say {word}"})) for word in WORDS]
ANSWERS = (TEXTS[0] + CALLS[0], TEXTS[1] + CALLS[1], TEXTS[2])
OPTIONS = ("--allowedTools", "Bash", "--max-turns", "5")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("npm")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md")))
    save_scripted_model(folder / MODEL, text, ANSWERS, CALLS)
    env = environment(KVBLEND_API_KEY=KEY)
    with serving(folder, env, "--model", MODEL, "--dtype", "float32") as url:
        yield Server(url, folder / "log")


def test_claude_code_speaks_calls_a_tool_and_goes_on(server, tmp_path):
    before = len(server.requests())
    transcript = converse(server, tmp_path, "Say two words with the shell.", *OPTIONS)
    turns = turns_of(transcript)
    blocks = [block for turn in turns for block in turn.blocks]
    read = [block for event in transcript if event["type"] == "user" for block in event["message"]["content"]]
    results = {block["tool_use_id"]: block["content"] for block in read if block["type"] == "tool_result"}
    assert [block["text"] for block in blocks if block["type"] == "text"] == list(TEXTS)
    uses = [block for block in blocks if block["type"] == "tool_use"]
    assert [(use["name"], use["input"]["command"]) for use in uses] == [("Bash", f"echo {word}") for word in WORDS]
    assert [results[use["id"]] for use in uses] == list(WORDS)
    end = transcript[-1]
    assert (end["type"], end["subtype"], end["result"]) == ("result", "success", TEXTS[2])
    requests = [request for request in server.requests()[before:] if request["path"] == "/v1/messages"]
    assert [request["status"] for request in requests] == [200] * len(TEXTS)
    assert min(turn.read_share for turn in turns[1:]) > 0.9
    until(server.has_learned)
    again = turns_of(converse(server, tmp_path, "Which words does the shell know?", *OPTIONS))
    assert again[0].read_share > 0.5, "another conversation begins with another header, and knows the text behind it"
    assert min(turn.read_share for turn in again[1:]) > 0.9
    assert all(request["status"] < 400 for request in server.requests()[before:])


@pytest.fixture(scope="module")
def node() -> str:
    path = shutil.which("node")
    if path is None or not (FOLDER / "node_modules/@anthropic-ai/sdk").is_dir():
        pytest.skip("Anthropic's SDK for Node is not installed: " + INSTALL.format("@anthropic-ai/sdk"))
    return path


def test_the_sdk_of_npm(node, server):
    script = Path(__file__).with_name("anthropic_sdk.mjs")
    command = [node, str(script), str(FOLDER), server.url, KEY, MODEL]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    replies = json.loads(printed.stdout)
    whole, streamed = replies["whole"], replies["streamed"]
    assert TEXTS[0].startswith(whole["content"][0]["text"])
    assert whole["stop_reason"] == "max_tokens"
    assert "".join(replies["texts"]) == streamed["content"][0]["text"] == whole["content"][0]["text"]
    assert len(replies["texts"]) > 1
    text, use = replies["called"]["content"]
    assert (text["text"], use["input"]["command"]) == (TEXTS[0], f"echo {WORDS[0]}")
    assert replies["called"]["stop_reason"] == "tool_use"
    usage = replies["called"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == replies["counted"]["input_tokens"]
    assert replies["next"]["content"][0]["text"] == TEXTS[1]
    assert replies["bad"] == ["BadRequestError", 400, "invalid_request_error"]
    assert replies["unknown"] == ["AuthenticationError", 401, "authentication_error"]
