"""The servers that are compared: how each is started and stopped, and in which words it is asked the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from _load import Request, TimedQuestion, Words
from _paths import foreign_environment, project_environment

CHAT = "/v1/chat/completions"
BLEND = ("-m", "blend", "serve")
VLLM = ("-m", "vllm.entrypoints.openai.api_server", "--enable-prefix-caching", "--enable-prompt-tokens-details")
CONNECTOR = {
    "kv_connector": "KVBlend",
    "kv_connector_module_path": "blend.integrations.vllm.connector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
}
MIDDLEWARE = "blend.integrations.vllm.middleware.KVBlend"
START_S = 1800.0  # vLLM compiles the model on its first start


@dataclass(frozen=True)
class Server:
    """How a server is started, and how it is asked. ready: path that answers when it is. environment: all of it."""

    name: str
    command: tuple[str, ...]
    words: Words
    environment: Mapping[str, str]
    ready: str


def blend_server(
    name: str, store: Path, model: Path, *extra: str, threads: int, answer_tokens: int, dtype: str = "float32"
) -> Server:
    """`blend serve` on a store; extra: more of its options, besides those in its name, such as `blend --full`."""
    options = ("--dtype", dtype, "--store", str(store), "--model", str(model), *name.split()[1:], *extra)
    command = (sys.executable, *BLEND, *options)
    return Server(name, command, partial(_chat_words, answer_tokens), project_environment(threads), "/ready")


def _chat_words(answer_tokens: int, question: TimedQuestion) -> Request:
    documents = [{"title": passage.title, "text": passage.text} for passage in question.passages]
    messages = [{"role": "user", "content": question.question}]
    return Request(CHAT, {"messages": messages, "documents": documents, **greedy(answer_tokens)})


def pasted(question: TimedQuestion) -> str:
    """A question behind its passages, as one text."""
    from blend.prompt_template import render_chunk

    return "".join(map(render_chunk, question.passages)) + question.question


def greedy(tokens: int) -> dict[str, Any]:
    """The likeliest tokens, so many of them."""
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Vllm:
    """The server that comes with vLLM. longest: tokens of a prompt and its answer. eager: without compiling."""

    python: str
    model: Path
    threads: int
    answer_tokens: int
    longest: int
    eager: bool = False
    dtype: str = "float32"

    def plain(self) -> Server:
        """By itself; it gets the token ids that kvblend makes of the question and its passages."""
        from transformers import AutoTokenizer

        from blend.config import PromptConfig
        from blend.layout import Place
        from blend.prompt_template import PromptTemplate
        from blend.serve.prompts.chat_template import ChatTemplate, question_turns
        from blend.serve.request import Message

        tokenizer = AutoTokenizer.from_pretrained(str(self.model))
        template = PromptTemplate(tokenizer)
        chat = ChatTemplate(tokenizer, template.prefix)

        def words(question: TimedQuestion) -> Request:
            passages = [Place(template.chunk_ids(passage)) for passage in question.passages]
            turns = question_turns([Message("user", question.question)], passages, PromptConfig.chat_instructions)
            token_ids = list(chat.layout(turns).token_ids)
            return Request("/v1/completions", {"prompt": token_ids, **greedy(self.answer_tokens)})

        return self._server("vllm", words)

    def blended(self, store: Path, ratio: float) -> Server:
        """With kvblend in it: vLLM's own model recomputes this share of the rows."""
        connector = {**CONNECTOR, "kv_connector_extra_config": {"store": str(store), "ratio": ratio}}
        options = ("--middleware", MIDDLEWARE, "--kv-transfer-config", json.dumps(connector))
        path = project_environment(self.threads)["PYTHONPATH"]
        words = partial(_chat_words, self.answer_tokens)
        # What kvblend computes while it is idle must not slow the other server down.
        last = ",".join(map(str, sorted(os.sched_getaffinity(0))[-self.threads :]))
        return self._server("vllm + kvblend", words, *options, PYTHONPATH=path, VLLM_CPU_OMP_THREADS_BIND=last)

    def _server(self, name: str, words: Words, *options: str, **variables: str) -> Server:
        command = (self.python, *VLLM, "--dtype", self.dtype, "--model", str(self.model), *options)
        command += ("--max-model-len", str(self.longest), *(["--enforce-eager"] if self.eager else []))
        return Server(name, command, words, vllm_environment(self.python, self.threads) | variables, "/health")


def vllm_environment(python: str, threads: int) -> dict[str, str]:
    """What vLLM's documentation asks for on CPUs: room for KV, threads bound to cores, its OpenMP preloaded."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    openmp = Path(python).parent.parent.glob("lib/libiomp5.so")
    malloc = Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")
    preloaded = [os.environ.get("LD_PRELOAD", ""), *map(str, (*openmp, *malloc))]
    return foreign_environment(
        VLLM_CPU_KVCACHE_SPACE=os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4"),
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
        LD_PRELOAD=":".join(filter(None, preloaded)),
    )


@dataclass(frozen=True)
class Running:
    """A server that answers. model: as it calls it."""

    server: Server
    url: str
    model: str
    process: subprocess.Popen[str]

    def words(self, question: TimedQuestion) -> Request:
        """A question in the words that this server understands."""
        return self.named(self.server.words(question))

    def named(self, request: Request) -> Request:
        """The request with the model's name in it."""
        return request._replace(body={"model": self.model, **request.body})


@contextmanager
def running(server: Server, log: Path) -> Iterator[Running]:
    """Start a server, wait until it is ready, stop it and all of its processes afterwards. log: gets its output."""
    from tests.places import free_port

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*server.command, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env=dict(server.environment), stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True, text=True,
        )  # fmt: skip
        try:
            _wait(server, process, url, log)
            yield Running(server, url, str(_get(f"{url}/v1/models").json()["data"][0]["id"]), process)
        finally:
            _stop(process)


def _wait(server: Server, process: subprocess.Popen[str], url: str, log: Path) -> None:
    """Return when the server is ready."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(httpx.HTTPError):
            _get(f"{url}{server.ready}")
            return
        time.sleep(0.2)
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    raise SystemExit(f"{server.name} did not start:\n{last}")


def _get(url: str) -> httpx.Response:
    """What is at a URL, past any proxy. Raises `httpx.HTTPError` for any status but success."""
    return httpx.get(url, timeout=5, trust_env=False).raise_for_status()


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask it to end, then kill the whole group, so that no child computes on while the next server runs."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
