"""The servers that are compared: how each is started and stopped, and in which words it is asked the same."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from _serving import TimedQuestion
from _serving_corpus import project_environment
from _serving_load import Request, Words

Way = Literal["documents", "pasted"]
BLEND = ("-m", "blend", "serve", "--dtype", "float32", "--host", "127.0.0.1", "--port", "0")
VLLM = (
    *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
    *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
)
CONNECTOR = {
    "kv_connector": "KVBlend",
    "kv_connector_module_path": "blend.integrations.vllm.connector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
}
START_S = 1800.0  # vLLM compiles the model on its first start
_URL = re.compile(r"http://[\w.\[\]:]+:\d+")


@dataclass(frozen=True)
class Server:
    """How a server is started, and how it is asked.

    url: where it will listen; "" for one that says so itself. ready: path that answers when it is. environment: all of it.
    """

    name: str
    command: tuple[str, ...]
    words: Words
    url: str = ""
    ready: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)


def blend_server(
    name: str,
    store: Path,
    model: Path,
    *,
    threads: int,
    answer_tokens: int,
    way: Way = "documents",
    extra: tuple[str, ...] = (),
) -> Server:
    """`blend serve` on a store, computing in float32; extra: more of its options, such as --full."""
    command = (sys.executable, *BLEND, "--store", str(store), "--model", str(model), *extra)

    def words(asked: TimedQuestion) -> Request:
        return Request("/v1/chat/completions", {**chat(asked, way), **greedy(answer_tokens)})

    return Server(name, command, words, ready="/ready", environment=project_environment(threads))


def chat(asked: TimedQuestion, way: Way) -> dict[str, Any]:
    """A question with its passages as documents beside the message, or pasted into it."""
    if way == "documents":
        documents = [{"title": one.title, "text": one.text} for one in asked.passages]
        return {"messages": [{"role": "user", "content": asked.question}], "documents": documents}
    from blend.prompt import render_chunk

    text = "".join(map(render_chunk, asked.passages))
    return {"messages": [{"role": "user", "content": f"{text}{asked.question}"}]}


def greedy(tokens: int) -> dict[str, Any]:
    """Of the likeliest tokens, at most so many."""
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def vllm_server(
    python: str,
    model: Path,
    *,
    threads: int,
    answer_tokens: int,
    longest: int,
    eager: bool = False,
    dtype: str = "float32",
) -> Server:
    """The server that comes with vLLM, on a CPU, in the environment of `python`, on so many cores.

    It gets the token ids that kvblend makes of the question and its passages. longest: tokens of a prompt and its answer.
    eager: without compiling, which takes minutes.
    """
    layout = _layout(model)

    def words(asked: TimedQuestion) -> Request:
        return Request("/v1/completions", {"prompt": list(layout(asked)), **greedy(answer_tokens)})

    return _vllm("vllm", _command(python, eager, dtype), model, longest, words, vllm_environment(python, threads))


def blended_vllm_server(
    python: str,
    store: Path,
    model: Path,
    *,
    threads: int,
    answer_tokens: int,
    longest: int,
    eager: bool = False,
    way: Way = "documents",
    ratio: float = 0.15,
    dtype: str = "float32",
) -> Server:
    """The same server with kvblend in it: vLLM's own model recomputes this share of the rows."""
    options = {"stage": "rows", "store": str(store), "ratio": ratio}
    connector = {**CONNECTOR, "kv_connector_extra_config": options}
    added = (
        "--middleware",
        "blend.integrations.vllm.middleware.KVBlend",
        "--kv-transfer-config",
        json.dumps(connector),
    )
    environment = vllm_environment(python, threads) | {"PYTHONPATH": project_environment(threads)["PYTHONPATH"]}

    def words(asked: TimedQuestion) -> Request:
        return Request("/v1/chat/completions", {**chat(asked, way), **greedy(answer_tokens)})

    return _vllm("vllm + kvblend", (*_command(python, eager, dtype), *added), model, longest, words, environment)


def _command(python: str, eager: bool, dtype: str) -> tuple[str, ...]:
    return (python, *VLLM, "--dtype", dtype, *(("--enforce-eager",) if eager else ()))


def _vllm(
    name: str, command: tuple[str, ...], model: Path, longest: int, words: Words, environment: Mapping[str, str]
) -> Server:
    port = free_port()
    more = ("--model", str(model), "--max-model-len", str(longest), "--port", str(port))
    return Server(name, (*command, *more), words, f"http://127.0.0.1:{port}", environment=environment)


def vllm_environment(python: str, threads: int) -> dict[str, str]:
    """What vLLM's documentation asks for on CPUs: room for KV, threads bound to cores, its OpenMP preloaded where it is."""
    found = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    found |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4"), "VLLM_NO_USAGE_STATS": "1"}
    found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    places = [*Path(python).parent.parent.glob("lib/libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    found["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD", ""), *map(str, places)]))
    return found


def _layout(model: Path) -> Any:
    from transformers import AutoTokenizer

    from blend.config import PromptConfig
    from blend.prompt import PromptTemplate
    from blend.serve.chat import ChatTemplate, Passage, question_turns
    from blend.serve.types import Message

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    template = PromptTemplate(tokenizer)
    chat = ChatTemplate(tokenizer, template.prefix)

    def ids(asked: TimedQuestion) -> tuple[int, ...]:
        passages = [Passage(template.chunk_ids(one)) for one in asked.passages]
        turns = question_turns([Message("user", asked.question)], passages, PromptConfig.chat_instructions)
        return chat.layout(turns).token_ids

    return ids


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Running:
    """A server that answers. model: as it calls it."""

    server: Server
    url: str
    model: str
    process: subprocess.Popen[str]

    def words(self, asked: TimedQuestion) -> Request:
        """A question in the words that this server understands."""
        return self.named(self.server.words(asked))

    def named(self, request: Request) -> Request:
        """The request with the model's name in it."""
        return Request(request.path, {"model": self.model, **request.body})


@contextmanager
def running(server: Server, log: Path) -> Iterator[Running]:
    """Start a server, wait until it is ready, stop it and all of its processes afterwards.

    log: gets what it says. Raises SystemExit with its last lines when it ends before it is ready.
    """
    with log.open("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            server.command, env=dict(server.environment), stdout=said, stderr=said, stdin=subprocess.DEVNULL,
            start_new_session=True, text=True,
        )  # fmt: skip
        try:
            url = _ready(server, process, log)
            yield Running(server, url, str(json.loads(_get(f"{url}/v1/models"))["data"][0]["id"]), process)
        finally:
            _stop(process, said)


def _ready(server: Server, process: subprocess.Popen[str], log: Path) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        found = _URL.search(log.read_text(encoding="utf-8", errors="replace")) if not server.url else None
        url = server.url or (found.group() if found else "")
        if url and _answers(f"{url}{server.ready}"):
            return url
        time.sleep(0.2)
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    raise SystemExit(f"{server.name} did not start:\n{last}")


def _answers(url: str) -> bool:
    try:
        _get(url)
    except OSError:
        return False
    return True


def _get(url: str) -> bytes:
    """What stands there, past any proxy. Raises OSError for a status that is none of success."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as response:
        return bytes(response.read())


def _stop(process: subprocess.Popen[str], said: IO[str]) -> None:
    """First politely; then the whole group, so that no child computes on beside the next server."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        said.write("did not end within 30 s of SIGTERM\n")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
