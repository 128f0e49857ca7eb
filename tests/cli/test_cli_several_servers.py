"""Several `blend serve` over one store: nothing acknowledged is lost, and all list the same."""

import itertools
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
from blend_process import Blend, all_caches

from tests.store import servers


def text_of(name: str) -> str:
    return f"The {name} opened in 1801. Its bell weighs {len(name)} kilograms. " * 8


class Server:
    def __init__(self, blend: Blend) -> None:
        self.running = blend.start("serve", "--port", "0", "--dtype", "float32")
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


@pytest.fixture
def start() -> Iterator[Callable[[Blend], Server]]:
    """Starts servers. All have ended behind the test."""
    started: list[Server] = []

    def start(blend: Blend) -> Server:
        started.append(Server(blend))
        return started[-1]

    yield start
    for server in started:
        server.http.close()
        with suppress(ProcessLookupError):
            server.running.send(signal.SIGKILL)


def all_ready(serving: list[Server], names: set[str]) -> None:
    """Wait until every server lists exactly these documents as ready."""
    wanted = dict.fromkeys(names, "ready")
    for server in serving:
        server.running.until(lambda server=server: server.states() == wanted, every=0.05)


@pytest.fixture
def machines(request: pytest.FixtureRequest, blend: Blend, tmp_path: Path) -> Iterator[Blend]:
    """The command line on one machine after the other, over one store."""
    if request.param == "plain":
        return itertools.repeat(blend)
    if request.param == "file":
        (tmp_path / "mounted").mkdir()
        return itertools.repeat(blend.shared(f"file://{tmp_path / 'mounted'}", tmp_path / "near"))
    blend.env = servers.s3_environment(servers.s3().port)
    address = f"s3://{servers.BUCKET}/{tmp_path.name}"
    return (blend.shared(address, tmp_path / f"near-{number}") for number in itertools.count())


@pytest.mark.parametrize(
    ("machines", "count"), [("plain", 3), ("file", 2), ("s3, a cache each", 3)], indirect=["machines"]
)
def test_documents_handed_to_any_server_are_listed_by_all(start, machines, count):
    with ThreadPoolExecutor(count) as pool:
        serving = list(pool.map(start, itertools.islice(machines, count)))
        names = [f"harbour-{number}" for number in range(2 * count)]
        assert all(pool.map(Server.put, [*serving, *serving], names))
    all_ready(serving, set(names))
    assert serving[-1].http.delete(f"/v1/documents/{names[0]}").json()["deleted"]
    all_ready(serving, set(names[1:]))
    for server in serving:
        server.end()


@pytest.mark.parametrize("machines", ["file"], indirect=True)
def test_a_rolling_restart_under_uploads_loses_nothing(start, machines):
    acknowledged, done = set[str](), threading.Event()
    serving = [start(next(machines)) for _ in range(2)]

    def upload() -> None:
        for number in itertools.count():
            if done.wait(0.1):
                return
            name = f"mill-{number}"
            if any(server.put(name) for server in list(serving)):
                acknowledged.add(name)

    with ThreadPoolExecutor(1) as pool:
        uploading = pool.submit(upload)
        try:
            for place in (0, 1):
                before = len(acknowledged)
                serving[place].running.until(lambda before=before: len(acknowledged) > before + 2)
                serving[place].end()
                serving[place] = start(next(machines))
        finally:
            done.set()
        uploading.result()
    all_ready(serving, acknowledged)


def test_a_killed_owner_is_followed_by_the_server_that_stands_by(start, blend):
    first, second = start(blend), start(blend)
    names = {f"quarry-{number}" for number in range(12)}
    assert all(server.put(name) for server, name in zip(itertools.cycle((first, second)), names, strict=False))
    first.end(signal.SIGKILL)
    all_ready([second], names)
    assert second.put("orchard")
    third = start(blend)
    assert third.put("weir")
    second.end(signal.SIGKILL)
    all_ready([third], {*names, "orchard", "weir"})


def test_a_document_deleted_at_one_server_leaves_no_learned_text_of_the_other(start, blend):
    first, second = start(blend), start(blend)

    def sources(server: Server) -> list[str]:
        body = {"messages": [{"role": "user", "content": f"{text_of('harbour')} {time.monotonic()}?"}], "max_tokens": 1}
        answer = server.http.post("/v1/chat/completions", json=body).json()
        return [source["kind"] for source in answer["kvblend"]["sources"]]

    second.running.until(lambda: sources(second) == ["learned"], every=0.05)
    assert sources(first) == ["learned"], "it follows the other's list"
    assert first.put("harbour")
    all_ready([first, second], {"harbour"})
    assert first.http.delete("/v1/documents/harbour").json()["deleted"]
    with closing(sqlite3.connect(blend.store / "learned.sqlite")) as file:
        assert file.execute("SELECT count(*) FROM pieces").fetchone() == (0,)
    assert all_caches(blend.store) == 0
    assert not sources(second), "from here on it is learned anew"
