"""Claude Code without a terminal and without a network, at a `blend serve` with a model that follows a script."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

FOLDER = Path(os.environ.get("KVBLEND_NPM", ".")).resolve()
INSTALL = "npm install {} in a folder, and name the folder in KVBLEND_NPM"
KEY, MODEL = "secret", "scripted"
_NO_NETWORK = "http://127.0.0.1:9"  # a proxy that is not there


class Server(NamedTuple):
    """A `blend serve`. log: what it writes to standard error."""

    url: str
    log: Path

    def requests(self) -> list[dict[str, Any]]:
        """What it has logged of the requests so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def metric(self, name: str) -> float:
        """One of its metrics, without labels."""
        metrics = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        [value] = re.findall(rf"^kvblend_{name} (\S+)$", metrics, re.MULTILINE)
        return float(value)

    def has_learned(self) -> bool:
        """Whether it has computed the caches of new text."""
        return self.metric("num_chunk_caches_waiting") == 0


class Turn(NamedTuple):
    blocks: list[dict[str, Any]]
    usage: dict[str, int]

    @property
    def read_share(self) -> float:
        """The share of the prompt's tokens that were read from memory."""
        read = self.usage["cache_read_input_tokens"]
        return read / (read + self.usage["cache_creation_input_tokens"] + self.usage["input_tokens"])


def find_claude() -> str:
    """The agent's command; skips without one."""
    path = shutil.which("claude", path=FOLDER / "node_modules/.bin") or shutil.which("claude")
    if path is None:
        pytest.skip("Claude Code is not installed: " + INSTALL.format("@anthropic-ai/claude-code"))
    return path


def converse(server: Server, folder: Path, question: str, *options: str) -> list[dict[str, Any]]:
    """The transcript of a conversation in `folder`/project. options: of the agent."""
    claude = find_claude()
    for name in ("home", "project"):
        (folder / name).mkdir(exist_ok=True)
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HTTP_PROXY": _NO_NETWORK,
        "HTTPS_PROXY": _NO_NETWORK,
        "NO_PROXY": "127.0.0.1",
    }
    agent = subprocess.run(
        [claude, "-p", question, "--output-format", "stream-json", "--verbose", *options],
        cwd=folder / "project",
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert agent.returncode == 0, agent.stdout[-2000:] + agent.stderr
    return [json.loads(line) for line in agent.stdout.splitlines()]


def turns_of(transcript: list[dict[str, Any]]) -> list[Turn]:
    """The model's answers. The agent writes each of their blocks apart."""
    turns: dict[str, Turn] = {}
    for event in transcript:
        if event["type"] == "assistant":
            message = event["message"]
            turns.setdefault(message["id"], Turn([], message["usage"])).blocks.extend(message["content"])
    return list(turns.values())
