"""vLLM's server with the connector and the middleware, as operators start it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from places import PYTHONPATH, free_port

KEY = "sk-test"
TOKENS = 12


def until(happened: Callable[[], Any], seconds: float = 1500) -> Any:
    """Wait for it. Patient: the machine may be busy with other things."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)
    return found


def body(question: str, **more: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": "tiny", "messages": [{"role": "user", "content": question}], **greedy, **more}


def whole(text: str) -> str:
    """Without a character that the last token only begins: vLLM leaves it out, kvblend marks it."""
    return text.strip().rstrip("\N{REPLACEMENT CHARACTER}")


class Process:
    """A command whose output goes into a file."""

    def __init__(self, command: list[str], log: Path, **variables: str) -> None:
        path = os.pathsep.join((PYTHONPATH, str(Path(__file__).parent)))
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        self.log, begin = log, log.stat().st_size if log.exists() else 0
        self._begin = begin
        with log.open("ab") as out:
            self.process = subprocess.Popen([sys.executable, *command], stdout=out, stderr=out, env=environment)

    @property
    def said(self) -> str:
        return self.log.read_bytes()[self._begin :].decode(errors="replace")

    def ready(self, line: str) -> None:
        until(lambda: line in self.said or self.process.poll() is not None)
        assert line in self.said, self.said

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.send(number)
        self.process.wait(120)


class Machines:
    """A store and a model, and vLLM's server over them."""

    def __init__(self, folder: Path, store: Path, model: Path) -> None:
        self.folder, self.store, self.model = folder, store, model
        self.url = f"http://127.0.0.1:{free_port()}"
        self.server: Process | None = None

    def start_server(
        self, options: dict[str, Any] | None = None, module: str = "blend.integrations.vllm.connector", **variables: str
    ) -> Process:
        """options: of the connector, out of this module, besides the store."""
        connector = {
            "kv_connector": "KVBlend",
            "kv_connector_module_path": module,
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": str(self.store), **(options or {})},
        }
        command = (
            f"-m vllm.entrypoints.openai.api_server --model {self.model} --served-model-name tiny --host 127.0.0.1 "
            f"--port {self.url.rpartition(':')[2]} --api-key {KEY} --dtype float32 --enforce-eager --max-model-len 4096 "
            "--max-num-seqs 16 --middleware blend.integrations.vllm.middleware.KVBlend --enable-prompt-tokens-details"
        )
        given = [*command.split(), "--kv-transfer-config", json.dumps(connector)]
        log = self.folder / "server.log"
        self.server = Process(given, log, **variables)
        until(lambda: self.server.process.poll() is not None or self._healthy())
        assert self.server.process.poll() is None, self.server.said
        return self.server

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions", key: str = KEY) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=300)

    def ask(self, question: str, *, stream: bool = False, **more: Any) -> tuple[str, dict[str, Any]]:
        """A greedy answer of vLLM's server, and what it says of the blend. more: fields of the request."""
        response = self.post({**body(question), "stream": stream, **more})
        assert response.status_code == 200, response.text
        if not stream:
            found = response.json()
            return whole(found["choices"][0]["message"]["content"]), found.get("kvblend", {})
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
        return whole(text), events[0].get("kvblend", {})

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if line.startswith("vllm:") and "_created" not in line]
        found: dict[str, float] = {}
        for name, _, value in pairs:
            key = name.partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
        return found

    def end(self) -> None:
        if self.server is not None:
            self.server.end()
