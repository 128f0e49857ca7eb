"""Every script below examples/ runs, as a user would run it: with a tiny model, or the default one if its answers matter."""

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path

import httpx
import pytest
from example_server import environment, serving, until
from places import REPOSITORY, free_port

from blend.config import DEFAULT_MODEL
from tests import towns
from tests.serve.tool_templates import SPECIAL, TEMPLATES
from tests.tiny_model import save_tiny_model

EXAMPLES = REPOSITORY / "examples"
IN_PROCESS = {"plain_python.py", "your_own_retriever.py", "evaluate.py"}
CLIENTS = {
    *("openai_client.py", "langchain_chain.py", "llamaindex_query.py", "litellm_client.py", "agent_loop.py"),
    "vllm_client.py",
    "chat.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, documents, a question file; where the examples run."""
    folder = tmp_path_factory.mktemp("examples")
    texts = towns.write_documents(folder / "documents")
    with_tools = {"template": TEMPLATES["qwen"], "special": SPECIAL["qwen"]}
    save_tiny_model(folder / "tiny", "\n".join(texts.values()), **with_tools)
    chunks = [{"title": name, "text": text} for name, text in texts.items()]
    record = {"id": "1", "question": "How many gates?", "answers": ["seven"], "chunks": chunks[:3]}
    (folder / "questions.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str, **variables: str) -> str:
    """What Python prints, with the tiny model and its store unless told otherwise."""
    env = environment(**{"KVBLEND_MODEL": str(folder / "tiny"), "KVBLEND_STORE": str(folder / "store"), **variables})
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(folder: Path, name: str, *arguments: str, **variables: str) -> str:
    return run(folder, str(EXAMPLES / name), *arguments, **variables)


def example_here(folder: Path, name: str, *arguments: str, **variables: str) -> str:
    """What an example prints that runs in this process, where everything it imports is loaded."""
    env = environment(**{"KVBLEND_MODEL": str(folder / "tiny"), "KVBLEND_STORE": str(folder / "store"), **variables})
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        for variable in os.environ.keys() - env.keys():
            patch.delenv(variable)
        for variable, value in env.items():
            patch.setenv(variable, value)
        patch.chdir(folder)
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    run(folder, "-m", "blend", "precompute", "documents", "--quick", "--chunk-tokens", "64")
    env = environment(KVBLEND_MODEL=str(folder / "tiny"), KVBLEND_STORE=str(folder / "store"))
    with serving(folder, env) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def default_url(tmp_path_factory: pytest.TempPathFactory, large_model: None) -> Iterator[str]:
    """`blend serve` with the default model, over documentation of the module csv."""
    folder = tmp_path_factory.mktemp("default")
    run(folder, "-m", "blend", "corpus", "docs-to-ask", "--module=csv")
    run(folder, "-m", "blend", "precompute", "docs-to-ask", KVBLEND_MODEL=DEFAULT_MODEL)
    with serving(folder, environment(KVBLEND_MODEL=DEFAULT_MODEL, KVBLEND_STORE=str(folder / "store"))) as address:
        yield f"{address}/v1"


def test_every_example_is_run_and_listed():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == IN_PROCESS | CLIENTS
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in listed for name in scripts)


def test_plain_python(folder):
    said = example_here(folder, "plain_python.py", "documents", "How many gates does the harbour have?")
    assert "caches computed" in said
    assert "with full prefill" in said


def test_your_own_retriever(folder):
    said = example_here(folder, "your_own_retriever.py", KVBLEND_STORE=str(folder / "own"))
    assert re.findall(r"(\d) of 3 chunks in the store", said) == ["0", "3"]


def test_evaluate(folder):
    example(folder, "evaluate.py", "questions.jsonl", KVBLEND_STORE=str(folder / "evaluated"))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert set(report["methods"]) == {"full", "reuse", "blend"}


@pytest.mark.real
def test_openai_client(folder, default_url):
    said = example(folder, "openai_client.py", KVBLEND_URL=default_url)
    first, first_rows, second, second_rows, streamed = said.splitlines()
    assert "seven gates" in first
    assert "seven gates" in second
    assert re.fullmatch(r"  full: \d+ of (\d+) rows computed", first_rows)
    assert re.fullmatch(r"  (full|blend): \d+ of (\d+) rows computed", second_rows), (
        "a busy machine has not yet learned"
    )
    assert re.search(r"Saturdays.*six to eleven", streamed)

    metrics = default_url.removesuffix("/v1") + "/metrics"
    until(lambda: "\nkvblend_num_chunk_caches_waiting 0.0\n" in httpx.get(metrics).text)
    example_documents = runpy.run_path(str(EXAMPLES / "openai_client.py"))["DOCUMENTS"]
    in_another_order = [example_documents[place] for place in (1, 0, 2)]
    question = {"role": "user", "content": "How many gates does the harbour have?"}
    request = {"model": DEFAULT_MODEL, "messages": [question], "max_tokens": 16, "documents": in_another_order}
    reply = httpx.post(f"{default_url}/chat/completions", json=request, timeout=300).json()
    figures = reply["kvblend"]["figures"]
    assert figures["method"] == "blend"
    assert figures["rows_computed"] < figures["rows"] / 2
    assert "seven gates" in reply["choices"][0]["message"]["content"]


def test_langchain_chain(folder, url):
    assert example(folder, "langchain_chain.py", KVBLEND_URL=url, KVBLEND_MODEL=model_of(url)).strip()


def test_chat(folder, url):
    env = environment(KVBLEND_URL=url)
    command = [sys.executable, str(EXAMPLES / "chat.py")]
    typed = "How many gates does the harbour have?\nAnd when does the market open?\n\n"
    ended = subprocess.run(command, cwd=folder, env=env, input=typed, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    times = re.findall(r"\[first token after \d+\.\d s, ([\d,]+) of ([\d,]+) rows computed\]", ended.stdout)
    assert len(times) == 2
    assert all(int(computed.replace(",", "")) <= int(rows.replace(",", "")) for computed, rows in times)


@pytest.mark.real
def test_llamaindex_query(folder, default_url):
    [question] = re.findall(r'llamaindex_query.py "(.*)"', (EXAMPLES / "llamaindex_query.py").read_text())
    said = example(folder, "llamaindex_query.py", question, KVBLEND_URL=default_url, KVBLEND_MODEL=DEFAULT_MODEL)
    assert "csv.DictWriter" in said


def test_litellm_client(folder, url):
    said = example(folder, "litellm_client.py", KVBLEND_URL=url, KVBLEND_MODEL=model_of(url))
    assert re.search(r"[1-9]\d+ tokens of prompt", said)


@pytest.mark.real
def test_agent_loop(folder, default_url):
    called, answered = example(folder, "agent_loop.py", KVBLEND_URL=default_url).splitlines()
    assert called == 'weather({"city": "Paris"}): It is raining in Paris, at 12 degrees.'
    assert re.search("rain|umbrella", answered)


def test_vllm_client_asks_what_the_server_of_kvblend_understands_too(folder, url):
    assert example(folder, "vllm_client.py", KVBLEND_URL=url).count("'method'") == 2


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
        "WEBUI_SECRET_KEY": "none",
        "DATA_DIR": str(folder / "open-webui"),
        "OFFLINE_MODE": "true",
    }
    env = environment(**variables)
    del env["PYTHONPATH"]
    words = [command, "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "open-webui.log"
    with log.open("w") as out, subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out) as server:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            until(lambda: _answers(client) or server.poll() is not None)
            assert server.poll() is None, log.read_text()[-2000:]
            token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client
        server.terminate()


def _answers(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/health").is_success
    return False


def test_open_webui(open_webui, url):
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
    questions = (f"{text}\n\nHow many sacks?", f"Read this, please.\n\n{text}\n\nWhich mill is the largest?")
    first, figures = (ask(question).json()["kvblend"]["figures"] for question in questions)
    assert (first["method"], figures["method"]) == ("full", "blend")
    assert figures["rows_computed"] < figures["rows"] / 2


def model_of(url: str) -> str:
    return str(httpx.get(f"{url}/models").json()["data"][0]["id"])
