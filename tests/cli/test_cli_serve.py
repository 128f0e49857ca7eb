"""`blend serve` as a process: its one line, its answers, its mistakes, its end."""

import json
import signal
import socket
import sys
from contextlib import ExitStack, suppress

import httpx
import pytest
from blend_process import one_line, serving

from blend.cli import blend as group
from blend.config import PromptConfig
from blend.errors import ConfigError
from tests.store import servers

QUESTION = "How many gates does the harbour have?"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": QUESTION}]


def test_it_answers_as_the_command_does(filled):
    common = ("--top-k", "4", "--max-new-tokens", "8", "--dtype", "float32")
    told = filled("answer", QUESTION, "--json", *common).json
    no_estimates = ("--quality", "0.05")
    options = ("--instructions", PromptConfig.instruction, *no_estimates, *common)
    with serving(filled, *options) as (running, http):
        names = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert names == ["tiny", "tiny+corpus"]
        asked = PromptConfig.question.replace("{question}", QUESTION)
        messages = [{"role": "system", "content": PromptConfig.system}, {"role": "user", "content": asked}]
        sources = http.post(CHAT, json={"model": "tiny+corpus", "messages": MESSAGES}).json()["kvblend"]["sources"]
        documents = [{"title": source["title"], "text": source["text"]} for source in sources]
        body = {"messages": messages, "documents": documents}
        answer = http.post(CHAT, json=body, headers={"x-request-id": "abc"}).json()
        metrics = http.get("/metrics").text
    assert answer["choices"][0]["message"]["content"].strip() == told["answer"]
    assert [source["id"] for source in sources] == [chunk["id"] for chunk in told["chunks"]]
    assert all(source["hit"] for source in answer["kvblend"]["sources"])
    assert answer["kvblend"]["figures"]["full_estimated_s"] > 0
    assert "kvblend_time_to_first_token_seconds_count 2.0" in metrics
    logged = [json.loads(line) for line in running.err.splitlines() if line.startswith("{")]
    assert [line["path"] for line in logged] == ["/v1/models", CHAT, CHAT, "/metrics"]
    assert logged[2]["id"] == "abc"
    assert running.err.count("`blend precompute --questions`") == 1
    assert "gates" not in running.err


def test_without_a_corpus_and_without_blending(blend):
    with serving(blend, "--full", "-q") as (running, http):
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny"]
        body = {"messages": MESSAGES, "max_tokens": 2, "documents": [{"text": "The harbour has two gates. " * 20}]}
        for _ in range(2):
            assert http.post(CHAT, json=body).json()["kvblend"]["figures"]["method"] == "full"
        assert http.post(CHAT, json={**body, "kvblend": {"retrieve": {}}}).status_code == 400
    assert '"path"' not in running.err


@pytest.mark.parametrize("last", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_waits_for_nobody(blend, last):
    body = {"messages": MESSAGES, "max_tokens": 3900, "stream": True}
    with serving(blend, "--grace", "600", last=last) as (running, http):
        stack = ExitStack()
        lines = stack.enter_context(http.stream("POST", CHAT, json=body)).iter_lines()
        next(lines)
        running.send(signal.SIGTERM)
        running.until(lambda: http.get("/ready").status_code == 503)
    with stack, suppress(httpx.TransportError):
        assert not [line for line in lines if '"finish_reason": "length"' in line]


def test_requests_are_refused_politely_while_what_runs_is_finished(blend):
    body = {"messages": MESSAGES, "max_tokens": 400, "stream": True}
    raw = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    with serving(blend, "--grace", "600") as (running, http), ExitStack() as stack:
        lines = stack.enter_context(http.stream("POST", CHAT, json=body)).iter_lines()
        next(lines)
        begun = stack.enter_context(socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=60))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        begun.sendall(head.encode() + raw[:5])
        running.send(signal.SIGINT)
        running.until(lambda: http.get("/ready").status_code == 503)
        asked = [http.post(CHAT, json=body), http.get("/ready"), http.get("/v1/models")]
        for refused in (*asked, http.post("/v1/documents", json={"documents": [{"text": "The mill has a wheel."}]})):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        begun.sendall(raw[5:])
        assert b"shutting_down" in b"".join(iter(lambda: begun.recv(100_000), b""))
        found = [line for line in lines if line.startswith("data: ")]
        assert found[-1] == "data: [DONE]"
        assert '"finish_reason": "length"' in found[-2]
        running.until(lambda: refuses(str(http.base_url)))


def refuses(url: str) -> bool:
    with suppress(httpx.TransportError):
        httpx.get(f"{url}/health")
        return False
    return True


def test_keys_give_rooms_that_are_the_owners_alone(blend):
    """Folders of tenants, corpora, uploads and learned passages; processes here have the umask 022."""
    store, keys = blend.folder / "new" / "store", blend.folder / "keys"
    keys.write_text("of-ann ann\n")
    keys.chmod(0o600)
    asked = {"messages": MESSAGES, "max_tokens": 1, "documents": [{"text": "The harbour has two gates. " * 40}]}
    with serving(blend.at(store), "--api-keys", keys, env={"KVBLEND_API_KEY": "of-bob of-all"}) as (running, http):
        assert http.get("/v1/models").status_code == 401
        for key in ("of-all", "of-ann"):
            http.headers["authorization"] = f"Bearer {key}"
            http.post(CHAT, json=asked).raise_for_status()
            for corpus in ("", "mine"):
                texts = {"documents": [{"id": "mill", "text": "The mill has a wheel of oak. " * 20}], "corpus": corpus}
                http.post("/v1/documents", json=texts).raise_for_status()
                mill = f"/v1/documents/mill?corpus={corpus}"
                running.until(lambda mill=mill: http.get(mill).json()["status"] == "ready")
    found = [store.parent, store, *(path for path in store.rglob("*") if path.is_dir())]
    names = {str(path.relative_to(store)) for path in found[1:]}
    assert names >= {f"{room}{name}" for room in ("", "tenants/ann/") for name in ("kv", "index", "corpora/mine/index")}
    assert {str(path): oct(path.stat().st_mode & 0o777) for path in found if path.stat().st_mode & 0o077} == {}
    assert (store / "tenants" / "ann" / "learned.sqlite").stat().st_mode & 0o777 == 0o600


def test_a_port_that_is_taken(blend):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = blend("serve", "--port", str(other.getsockname()[1]))
    assert "is in use: choose another one with --port" in result.refused(2)
    assert "Loading" not in result.err


def test_what_cannot_be_loaded_ends_it(blend):
    folder = blend.folder / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    result = blend("serve", "--port", "0", "--model", folder)
    assert result.code in (2, 4)
    one_line(result.err)


def test_a_signal_ends_it_while_it_loads(blend):
    running = blend.start("serve", "--port", "0")
    result = running.until(lambda: "Loading" in running.err).send(signal.SIGTERM).wait()
    assert result.code == 0, result.err
    assert "Traceback" not in result.err


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install .*serve"):
        group.main(["serve"], standalone_mode=False)


def test_a_redis_that_would_evict_indexes_is_refused(blend, tmp_path):
    port = servers.redis_port("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    refused = blend.shared(f"redis://127.0.0.1:{port}/0", tmp_path / "near")("serve", "--port", "0").refused(7)
    assert "its maxmemory-policy is allkeys-lru): set it to volatile-lru" in refused
