"""Several `blend serve` over one store: nothing acknowledged is lost, and all list the same."""

import itertools
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from blend_process import Blend, Running

from tests.store import servers

LAST_S = 120
Environments = Iterator[dict[str, str]]


def text_of(name: str) -> str:
    return f"The {name} opened in 1801. Its bell weighs {len(name)} kilograms. " * 8


class Server:
    """A running `blend serve`."""

    def __init__(self, blend: Blend, env: dict[str, str]) -> None:
        self.running: Running = blend.start("serve", "--port", "0", "--dtype", "float32", env=env)
        self.http = httpx.Client(base_url=self.running.url(), timeout=60)

    def put(self, name: str) -> bool:
        """Hand in a document; whether it was acknowledged."""
        with suppress(httpx.TransportError, RuntimeError):  # it ends, or has ended
            body = {"documents": [{"id": name, "title": name, "text": text_of(name)}]}
            return self.http.post("/v1/documents", json=body).status_code == 202
        return False

    def states(self) -> dict[str, str]:
        return {one["id"]: one["status"] for one in self.http.get("/v1/documents").json()["data"]}

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        result = self.running.send(number).wait()
        assert result.code == (0 if number == signal.SIGTERM else -number), result.err
        self.http.close()


@contextmanager
def all_ended(serving: list[Server]) -> Iterator[None]:
    try:
        yield
    finally:
        for server in serving:
            server.http.close()
            with suppress(ProcessLookupError):
                os.kill(server.running.pid, signal.SIGKILL)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LAST_S
    while not happened():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


def all_ready(serving: list[Server], names: set[str]) -> None:
    """Wait until every server lists exactly these documents as ready."""
    wanted = dict.fromkeys(names, "ready")
    with suppress(AssertionError):
        until(lambda: all(server.states() == wanted for server in serving))
    for server in serving:
        assert server.states() == wanted, server.running.err


@pytest.fixture
def environments(request: pytest.FixtureRequest, tmp_path: Path) -> Environments:
    """The environment of one server after the other, over one store."""
    if request.param == "plain":
        return itertools.repeat({})
    if request.param == "file":
        (tmp_path / "mounted").mkdir()
        address, secrets = f"file://{tmp_path / 'mounted'}", {}
    else:
        address, secrets = f"s3://{servers.BUCKET}/{tmp_path.name}", servers.s3_environment(servers.s3().port)
    caches = itertools.count() if "each" in request.param else itertools.repeat(0)
    return (
        {"KVBLEND_STORE": address, "KVBLEND_STORE_CACHE": str(tmp_path / f"near-{number}"), **secrets}
        for number in caches
    )


@pytest.mark.parametrize(
    ("environments", "count"), [("plain", 3), ("file", 2), ("s3, a cache each", 3)], indirect=["environments"]
)
def test_documents_handed_to_any_server_are_listed_by_all(blend, environments, count):
    with ThreadPoolExecutor(count) as pool:
        serving = list(pool.map(lambda env: Server(blend, env), itertools.islice(environments, count)))
        with all_ended(serving):
            names = [f"harbour-{number}" for number in range(2 * count)]
            assert all(
                pool.map(lambda given: given[0].put(given[1]), zip(itertools.cycle(serving), names, strict=False))
            )
            all_ready(serving, set(names))
            assert serving[-1].http.delete(f"/v1/documents/{names[0]}").json()["deleted"]
            all_ready(serving, set(names[1:]))
            for server in serving:
                server.end()


@pytest.mark.parametrize("environments", ["file"], indirect=True)
def test_a_rolling_restart_under_uploads_loses_nothing(blend, environments):
    acknowledged, done = set[str](), threading.Event()
    serving = [Server(blend, next(environments)) for _ in range(2)]

    def upload() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            name = f"mill-{number}"
            if any(server.put(name) for server in list(serving)):
                acknowledged.add(name)
            time.sleep(0.1)

    with all_ended(serving), ThreadPoolExecutor(1) as pool:
        uploading = pool.submit(upload)
        try:
            for place in (0, 1):
                before = len(acknowledged)
                until(lambda: len(acknowledged) > before + 2)  # noqa: B023
                serving[place].end()
                serving[place] = Server(blend, next(environments))
        finally:
            done.set()
        uploading.result()
        all_ready(serving, acknowledged)


def test_a_killed_owner_is_followed_by_the_server_that_stands_by(blend):
    serving = [Server(blend, {}) for _ in range(2)]
    with all_ended(serving):
        names = [f"quarry-{number}" for number in range(12)]
        assert all(serving[number % 2].put(name) for number, name in enumerate(names))
        serving[0].end(signal.SIGKILL)
        all_ready(serving[1:], set(names))
        assert serving[1].put("orchard")
        serving[0] = Server(blend, {})
        assert serving[0].put("weir")
        serving[1].end(signal.SIGKILL)
        all_ready(serving[:1], {*names, "orchard", "weir"})


def test_a_document_deleted_at_one_server_leaves_no_learned_text_of_the_other(blend):
    assert blend.store is not None
    listed, caches = blend.store / "learned.sqlite", blend.store / "kv" / "objects"
    serving = [Server(blend, {}) for _ in range(2)]

    def sources(server: Server) -> list[str]:
        body = {"messages": [{"role": "user", "content": f"{text_of('harbour')} {time.monotonic()}?"}], "max_tokens": 1}
        answer = server.http.post("/v1/chat/completions", json=body).json()
        return [source["kind"] for source in answer["kvblend"]["sources"]]

    with all_ended(serving):
        until(lambda: sources(serving[1]) == ["learned"])
        assert sources(serving[0]) == ["learned"], "it follows the other's list"
        assert serving[0].put("harbour")
        all_ready(serving, {"harbour"})
        assert serving[0].http.delete("/v1/documents/harbour").json()["deleted"]
        with closing(sqlite3.connect(listed)) as file:
            assert file.execute("SELECT count(*) FROM pieces").fetchone() == (0,)
        assert not [*caches.rglob("*.safetensors")]
        assert not sources(serving[1]), "from here on it is learned anew"
