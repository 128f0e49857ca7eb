"""Claude Code's own subagents, which read the same files at the same time, against `blend serve`."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from claude_code import KEY, MODEL, Server, converse, find_claude
from example_server import environment, serving
from places import REPOSITORY

from tests.scripted_model import call, save_scripted_model

REPORTS = {"amber": ("Reading", "one"), "birch": ("Off", "two"), "cobalt": ("Shall", "three")}
"""What each subagent says before it reads, and behind it; its name stands in its task."""
FILES = ("why.md", "census.md", "stores.md")
CHARACTERS = 4000  # of each file
SLOW = {"num_hidden_layers": 4, "intermediate_size": 4096}  # computing must take longer than reading a cache


def task(name: str) -> str:
    """The call that starts a subagent."""
    prompt = f"You are {name}. Read the files of this folder, and report."
    arguments = {"description": f"Read as {name}", "prompt": prompt, "subagent_type": "general-purpose"}
    return call("Task", json.dumps(arguments))


def reads(number: int, folder: Path) -> list[str]:
    """The calls of a subagent. The first two read the files in the same order."""
    begin = max(0, number - 1)
    in_order = [*FILES[begin:], *FILES[:begin]]
    return [call("Read", json.dumps({"file_path": str(folder / name), "limit": 900 + number})) for name in in_order]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the files."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in FILES:
        text = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        (folder / name).write_text(text[:CHARACTERS], encoding="utf-8")
    return folder


@pytest.fixture
def server(tmp_path: Path, project: Path) -> Iterator[Server]:
    find_claude()  # or the test is skipped
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md")))
    calls = {name: reads(number, project) for number, name in enumerate(REPORTS)}
    tasks = [task(name) for name in REPORTS]
    others = {name: (begin + "".join(calls[name]), end) for name, (begin, end) in REPORTS.items()}
    save_scripted_model(
        tmp_path / MODEL,
        text,
        ("Go:" + "".join(tasks), "back"),
        [*tasks, *chain.from_iterable(calls.values())],
        others=others,
        **SLOW,
    )
    with serving(tmp_path, environment(KVBLEND_API_KEY=KEY), "--model", MODEL, "--dtype", "float32") as url:
        yield Server(url, tmp_path / "log")


def test_files_that_subagents_read_at_the_same_time_are_computed_once(server, tmp_path):
    tools = ("--tools", "Task,Read", "--allowedTools", "Task,Read", "--max-turns", "8")
    transcript = converse(server, tmp_path, "Send them.", *tools)
    assert transcript[-1]["result"] == "back"
    outcomes = [event["tool_use_result"] for event in transcript if "agentId" in (event.get("tool_use_result") or ())]
    assert sorted(outcome["content"][0]["text"] for outcome in outcomes) == sorted(end for _, end in REPORTS.values())
    assert [outcome["totalToolUseCount"] for outcome in outcomes] == [len(FILES)] * len(REPORTS)
    requests = [request for request in server.requests() if request.get("path") == "/v1/messages"]
    assert [request["status"] for request in requests] == [200] * 8
    first, second = sorted(request["rows"] for request in requests[1:7])[::3]
    read = second - first  # rows of the files
    assert server.metric("rows_ahead_total") > 0.5 * read
    assert server.metric("rows_shared_total") > read, "the one that computes it, and others"
    computed = sum(outcome["usage"]["cache_creation_input_tokens"] for outcome in outcomes)
    assert computed < 0.85 * len(REPORTS) * read, "what each computes, for itself and for all"
