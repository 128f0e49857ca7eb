"""vLLM's server with the connector and the middleware, as operators start it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from places import PYTHONPATH, free_port

from blend.config import CorpusConfig
from blend.rag import Rag

TOKENS = 12
RATIO = 0.15
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.2, "tie_word_embeddings": False}


def until(happened: Callable[[], Any], seconds: float = 1500) -> Any:
    """Wait for it. Patient: the machine may be busy with other things."""
    deadline = time.monotonic() + seconds
    while not (value := happened()):
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)
    return value


def precompute(store: Path, model: Path, texts: Path, towns: tuple[str, ...], **corpus: Any) -> None:
    """A corpus of one document for each town, by kvblend's own decoder."""
    texts.mkdir()
    for town in towns:
        (texts / f"{town}.txt").write_text(about(town))
    config = CorpusConfig(codec="native", **corpus)
    Rag(store, model=str(model), device="cpu", dtype="float32", corpus=config).precompute(texts)


def about(town: str) -> str:
    return f"{town} has {len(town)} bridges and a mayor who rows. " * 6


def whole(text: str) -> str:
    """Without a character that the last token only begins: vLLM leaves it out, kvblend marks it."""
    return text.strip().rstrip("\N{REPLACEMENT CHARACTER}")


class Server:
    """vLLM's server over a model and a store. options: more of the connector."""

    def __init__(self, store: Path, model: Path, log: Path, **options: Any) -> None:
        self.store = store
        self.model = model
        self.url = f"http://127.0.0.1:{free_port()}"
        connector = {
            "kv_connector": "KVBlend",
            "kv_connector_module_path": "blend.integrations.vllm.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": str(store), "ratio": RATIO, **options},
        }
        command = (
            f"-m vllm.entrypoints.openai.api_server --model {model} --served-model-name tiny --host 127.0.0.1 "
            f"--port {self.url.rpartition(':')[2]} --dtype float32 --enforce-eager --max-model-len 4096 "
            "--max-num-seqs 16 --middleware blend.integrations.vllm.middleware.KVBlend"
        )
        arguments = [sys.executable, *command.split(), "--kv-transfer-config", json.dumps(connector)]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        with log.open("wb") as out:
            self.process = subprocess.Popen(arguments, stdout=out, stderr=out, env=environment)
        until(lambda: self.process.poll() is not None or self._healthy())
        assert self.process.poll() is None, log.read_text(errors="replace")

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, question: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """A greedy answer of vLLM's server, and what it says of the blend. more: fields of the request."""
        reply = self.reply(question, **more)
        return whole(reply["choices"][0]["message"]["content"]), reply["kvblend"]

    def reply(self, question: str, **more: Any) -> dict[str, Any]:
        """The whole reply to such a request."""
        greedy = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        body = {**greedy, "messages": [{"role": "user", "content": question}], **more}
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=300)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    def counts(self) -> dict[str, float]:
        """kvblend's counters on vLLM's own page of metrics."""
        ours = [line for line in self._metrics() if line.startswith("vllm:kvblend_") and "_total{" in line]
        return {line.partition("_total{")[0].removeprefix("vllm:kvblend_"): float(line.split()[-1]) for line in ours}

    def running(self) -> int:
        """How many requests the engine has begun."""
        lines = [line for line in self._metrics() if line.startswith("vllm:num_requests_running{")]
        return sum(int(float(line.split()[-1])) for line in lines)

    def _metrics(self) -> list[str]:
        return httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()


@contextmanager
def serving(store: Path, model: Path, log: Path, **options: Any) -> Iterator[Server]:
    """A server until it ends, which it does when it is told to."""
    server = Server(store, model, log, **options)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(120)
