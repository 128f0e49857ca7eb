"""`scripts/bench_peers` and `scripts/peer_tests` with small programs in place of the peers'.

`tests/scripts/test_bench_serve_command.py` starts servers as processes. Here `bench_peers` gets one that only says its model's
name, and `peer_tests` a real one in this process.
"""

import json
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
from commands import main, module, printed

import _servers
from blend.errors import ConfigError
from blend.rag import Rag
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.service import Service
from tests.serve.served import listening
from tests.tiny_model import save_tiny_model

LMCACHE = """
import json, sys, urllib.request
given = dict(zip(sys.argv, sys.argv[1:]))
models = json.load(urllib.request.urlopen(given["--engine-url"] + "/v1/models"))["data"]
assert models[0]["id"] == given["--model"]
ttft = {f"{name}_ttft_ms": 500.0 for name in ("mean", "p50", "p90", "p99")}
results = {**ttft, "mean_decode_speed": 8.0, "failed_requests": 0, "total_requests": int(given["--rag-num-samples"])}
json.dump({"results": results}, open(given["--output-dir"] + "/bench_summary.json", "w"))
lines = open(given["--rag-dataset"]).read().splitlines()
quality = {"run_fingerprint": str(len(lines)), "summary": {"f1_mean": 0.25, "num_parsed": 2}}
json.dump(quality, open(given["--output-dir"] + "/rag_qa_quality.json", "w"))
"""
SUITE = """
import os, requests
URL = "http://127.0.0.1:" + os.environ["PORT"]

def ask(path, **more):
    return requests.post(URL + path, json={"model": "gpt-3.5", "max_tokens": 2, **more})

def test_chat_is_answered():
    answer = ask("/chat/completions", messages=[{"role": "user", "content": "Hello"}])
    assert answer.json()["usage"]["completion_tokens"] == 2

def test_grammar_is_taken():
    assert ask("/completions", prompt="Hello", grammar="x").status_code == 200

def test_return_progress():
    raise SystemExit("this does not apply")
"""


def environment(folder, steps, program=""):
    """An environment as the scripts leave it behind, with this python in it."""
    (folder / "bin").mkdir(parents=True)
    for name, code in (("python", '"$@"'), ("lmcache", f'"{folder}/lmcache.py" "$@"')):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {code}\n')
        (folder / "bin" / name).chmod(0o755)
    (folder / "lmcache.py").write_text(program)
    (folder / "installed").write_text("\n".join(map(" ".join, steps)))


class Models(BaseHTTPRequestHandler):
    """Says the model's name."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def log_message(self, *_):
        """Nothing is printed."""


@pytest.fixture
def commands(monkeypatch):
    """Commands of the servers that were started, none of which is real."""
    started = []

    @contextmanager
    def running(server, log):
        started.append(server.command)
        with HTTPServer(("127.0.0.1", 0), Models) as web:
            Thread(target=web.serve_forever).start()
            try:
                yield SimpleNamespace(url=f"http://127.0.0.1:{web.server_port}", model="tiny")
            finally:
                web.shutdown()

    monkeypatch.setattr(_servers, "running", running)
    return started


def test_both_arms_are_asked_the_same(commands, tmp_path):
    environment(tmp_path / "lmcache", module("bench_peers").LMCACHE, LMCACHE)
    model = save_tiny_model(tmp_path / "tiny", "The harbour of town 1 has 12 gates.")
    given = ("--json", tmp_path / "p.json", "--environments", tmp_path, "--model", model, "--only", "rag-qa-quality")
    asked = ("bench_peers", *given, "--threads", 1, "--requests", 3)
    first = printed(*asked)
    rows = json.loads((tmp_path / "p.json").read_text())["rows"]
    assert [(row["arm"], row["requests"], row["f1"]) for row in rows] == [("blend", 3, 0.25), ("blend --full", 3, 0.25)]
    assert "rag-qa-quality: median TTFT is 1.00 times as short as with --full" in first
    ours, full = map(list, commands)
    assert all(words[words.index("--model") + 1] == str(model) for words in (ours, full))
    assert [words.count("--full") for words in (ours, full)] == [0, 1]
    assert ours[ours.index("--store") + 1] != full[full.index("--store") + 1], "each has a store that is empty"
    (tmp_path / "lmcache" / "bin" / "lmcache").unlink()
    assert printed(*asked) == first, "every row was there"
    assert len(commands) == 2


def test_a_file_without_rows_shows_no_empty_table(tmp_path):
    with pytest.raises(ConfigError, match="run it without --show"):
        main("bench_peers", "--json", tmp_path / "p.json", "--show")


def test_arms_that_were_asked_other_prompts_are_not_compared():
    ours, full = ([{"ttft_s": {"p50": 1.0}, "fingerprint": name}] for name in "ab")
    compared = module("bench_peers").ratio("rag-qa-quality", ours, full)
    assert compared == "rag-qa-quality: the arms were asked different prompts"


def test_questions_stand_over_the_passage_that_answers_them(tmp_path):
    options = SimpleNamespace(requests=8, documents=5, document_tokens=256, environments=tmp_path)
    file = module("bench_peers").towns(options)
    for record in map(json.loads, file.read_text().splitlines()):
        [told] = [one["paragraph_text"] for one in record["paragraphs"] if one["is_supporting"]]
        fact = record["question"].split()[2]
        assert f"has {record['answer']} {fact}." in told


@pytest.fixture
def in_process(monkeypatch):
    """Servers run in a thread of this process."""

    @contextmanager
    def running(server, log):
        words = list(server.command)
        store, model = (words[words.index(option) + 1] for option in ("--store", "--model"))
        rag = Rag(store, model=model, device="cpu")
        service = Service(rag, EmbeddedEngine(rag.blender))
        service.warm_up()
        with listening(service) as served:
            yield SimpleNamespace(url=served.url, model=served.model)

    monkeypatch.setattr(_servers, "running", running)


@pytest.mark.usefixtures("in_process")
def test_a_suite_is_run_against_our_address_and_model(tmp_path):
    environment(tmp_path / "tests", [module("peer_tests").REQUIREMENTS])
    unit = tmp_path / "sources" / "llama.cpp" / "tools" / "server" / "tests" / "unit"
    unit.mkdir(parents=True)
    (unit / "test_chat_completion.py").write_text(SUITE)
    (unit / "test_slots.py").write_text("import a_module_that_is_not_there\n\ndef test_slots(): ...\n")
    options = ("--environments", tmp_path, "--sources", tmp_path / "sources", "--only", "llama.cpp")
    shown = printed("peer_tests", *options)
    assert "| llama.cpp | 1 | 1 | 2 |" in shown
    failed = "1 x AssertionError: assert 400 == 200: test_chat_completion.py::test_grammar_is_taken"
    assert f"FAILED llama.cpp, {failed}" in shown
    assert "| llama.cpp | 2 | llama.cpp's own endpoint or field |" in shown
