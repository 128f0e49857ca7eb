"""Every script below examples/ runs, as a user would run it: with a tiny model, or the default one if its answers matter."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from places import PYTHONPATH, REPOSITORY, free_port

from blend.config import DEFAULT_MODEL
from tests import towns
from tests.serve.tool_templates import SPECIAL, TEMPLATES
from tests.tiny_model import save_tiny_model

EXAMPLES = REPOSITORY / "examples"
IN_PROCESS = {"plain_python.py", "your_own_retriever.py", "evaluate.py"}
CLIENTS = {
    *("openai_client.py", "langchain_chain.py", "llamaindex_query.py", "litellm_client.py", "agent_loop.py"),
    "vllm_client.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, documents, a question file; where the examples run."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "documents").mkdir()
    texts = towns.documents()
    for name, text in texts.items():
        (folder / "documents" / name).write_text(text, encoding="utf-8")
    with_tools = {"template": TEMPLATES["qwen"], "special": SPECIAL["qwen"]}
    save_tiny_model(folder / "tiny", "\n".join(texts.values()), **with_tools)
    chunks = [{"title": name, "text": text} for name, text in texts.items()]
    record = {"id": "1", "question": "How many gates?", "answers": ["seven"], "chunks": chunks[:3]}
    (folder / "questions.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVBLEND")}
    mine = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**kept, **mine, "KVBLEND_MODEL": str(folder / "tiny"), "KVBLEND_STORE": str(folder / "store"), **more}


def run(folder: Path, name: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder, **variables), capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """`blend serve` over a store that holds the documents."""
    with serving(folder, environment(folder), "documents", "--quick", "--chunk-tokens", "64") as address:
        yield address


@pytest.fixture(scope="module")
def default_url(tmp_path_factory: pytest.TempPathFactory, large_model: None) -> Iterator[str]:
    """`blend serve` with the default model, over documentation of the module csv."""
    folder = tmp_path_factory.mktemp("default")
    env = environment(folder, KVBLEND_MODEL=DEFAULT_MODEL)
    command = [sys.executable, "-m", "blend", "corpus", "docs-to-ask", "--module=csv"]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    with serving(folder, env, "docs-to-ask") as address:
        yield address


@contextmanager
def serving(folder: Path, env: dict[str, str], *documents: str) -> Iterator[str]:
    """The address of a `blend serve` in `folder` over these documents. documents: arguments of `blend precompute`."""
    blend = [sys.executable, "-m", "blend"]
    precompute = [*blend, "precompute", *documents]
    subprocess.run(precompute, cwd=folder, env=env, check=True, capture_output=True)
    command = [*blend, "serve", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=env, **pipes) as server:
        addresses = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stdout)
        yield next(found.group() for found in addresses if found) + "/v1"
        server.terminate()
        server.stdout.read()


def test_every_example_is_run_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == IN_PROCESS | CLIENTS
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in listed for name in scripts)


def test_plain_python(folder: Path) -> None:
    said = run(folder, "plain_python.py", "documents", "How many gates does the harbour have?")
    assert "caches computed" in said
    assert "with full prefill" in said


def test_your_own_retriever(folder: Path) -> None:
    said = run(folder, "your_own_retriever.py", KVBLEND_STORE=str(folder / "own"))
    assert re.findall(r"(\d) of 3 chunks in the store", said) == ["0", "3"]


def test_evaluate(folder: Path) -> None:
    run(folder, "evaluate.py", "questions.jsonl", KVBLEND_STORE=str(folder / "evaluated"))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert set(report["methods"]) == {"full", "reuse", "blend"}


@pytest.mark.real
def test_openai_client(folder: Path, default_url: str) -> None:
    first, full, second, blended, streamed = run(folder, "openai_client.py", KVBLEND_URL=default_url).splitlines()
    assert "seven gates" in first
    assert "seven gates" in second
    assert re.fullmatch(r"  full: \d+ of (\d+) rows computed", full)
    counts = re.fullmatch(r"  blend: (\d+) of (\d+) rows computed", blended)
    assert int(counts[1]) < int(counts[2])
    assert re.search(r"Saturdays.*six to eleven", streamed)


def test_langchain_chain(folder: Path, url: str) -> None:
    assert run(folder, "langchain_chain.py", KVBLEND_URL=url, KVBLEND_MODEL=model_of(url)).strip()


@pytest.mark.real
def test_llamaindex_query(folder: Path, default_url: str) -> None:
    [question] = re.findall(r'llamaindex_query.py "(.*)"', (EXAMPLES / "llamaindex_query.py").read_text())
    said = run(folder, "llamaindex_query.py", question, KVBLEND_URL=default_url, KVBLEND_MODEL=DEFAULT_MODEL)
    assert "csv.DictWriter" in said


def test_litellm_client(folder: Path, url: str) -> None:
    said = run(folder, "litellm_client.py", KVBLEND_URL=url, KVBLEND_MODEL=model_of(url))
    assert re.search(r"[1-9]\d+ tokens of prompt", said)


@pytest.mark.real
def test_agent_loop(folder: Path, default_url: str) -> None:
    called, answered = run(folder, "agent_loop.py", KVBLEND_URL=default_url).splitlines()
    assert called == 'weather({"city": "Paris"}): It is raining in Paris, at 12 degrees.'
    assert re.search("rain|umbrella", answered)


def test_vllm_client_asks_what_the_server_of_kvblend_understands_too(folder: Path, url: str) -> None:
    assert run(folder, "vllm_client.py", KVBLEND_URL=url).count("'method'") == 2


@pytest.fixture(scope="module")
def open_webui(folder: Path, url: str) -> Iterator[httpx.Client]:
    """Open WebUI with the server as its only connection, as docs/open_webui.md sets it up."""
    command = os.environ.get("KVBLEND_OPEN_WEBUI") or shutil.which("open-webui")
    if not command:
        pytest.skip("Open WebUI is not installed: put open-webui on the PATH, or name it in KVBLEND_OPEN_WEBUI")
    port = free_port()
    variables = {
        "OPENAI_API_BASE_URL": url,
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "false",
        "WEBUI_AUTH": "false",
    }
    variables |= {"DATA_DIR": str(folder / "open-webui"), "OFFLINE_MODE": "true", "WEBUI_SECRET_KEY": "none"}
    kept = {name: value for name, value in environment(folder, **variables).items() if name != "PYTHONPATH"}
    words = [command, "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "open-webui.log"
    with log.open("w") as out, subprocess.Popen(words, cwd=folder, env=kept, stdout=out, stderr=out) as server:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            until = time.monotonic() + 300
            while not _answers(client):
                assert server.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < until, log.read_text()[-2000:]
                time.sleep(0.5)
            token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client
        server.terminate()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def test_open_webui(open_webui: httpx.Client, url: str) -> None:
    models = [one["id"] for one in open_webui.get("/api/models").json()["data"]]
    assert model_of(url) in models
    text = " ".join(f"Mill {number} of Brackwater grinds {number * 7} sacks of rye a day." for number in range(30))

    def ask(question: str, **more: object) -> httpx.Response:
        said = [{"role": "user", "content": question}]
        body = {"model": model_of(url), "messages": said, "max_tokens": 4, **more}
        return open_webui.post("/api/chat/completions", json=body).raise_for_status()

    assert ask("Which town is this?").json()["choices"][0]["message"]["content"]
    lines = [line.removeprefix("data: ") for line in ask("Which town is it?", stream=True).text.split("\n\n") if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks)
    first, second = (
        ask(f"{text}\n\nHow many sacks?"),
        ask(f"Read this, please.\n\n{text}\n\nWhich mill is the largest?"),
    )
    assert first.json()["kvblend"]["figures"]["method"] == "full"
    figures = second.json()["kvblend"]["figures"]
    assert figures["method"] == "blend"
    assert figures["rows_computed"] < figures["rows"] / 2


def model_of(url: str) -> str:
    return str(httpx.get(f"{url}/models").json()["data"][0]["id"])
