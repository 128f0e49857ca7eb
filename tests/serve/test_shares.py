"""Whatever waits in the server: one client's many hold up another's single one for a few slices at most, and have a bound."""

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from changing import WordCounts, compute_here, open_corpus, page, until
from engines import MakeEngine

from blend.chunks.library import ChunkLibrary
from blend.layout import PromptLayout
from blend.serve.audit import Auditor
from blend.serve.documents.documents import Documents, indexing_turns
from blend.serve.events import Figures, Finished, OnEvent, Output, QueueFullError, Started, Token
from blend.serve.http.app import make_app
from blend.serve.http.keys import ApiKeys
from blend.serve.limits import RequestLimits
from blend.serve.metrics import Metrics
from blend.serve.prompt import Prompt
from blend.serve.turns import Slices, Turns
from blend.store import open_store
from blend.types import CacheKey

HOSTILE, OTHER = "hostile", "other"
MANY = 5
CLIENTS = (*[HOSTILE] * MANY, OTHER)


def work(client: str, served: list[str], go_on: threading.Event, slices: int = 1) -> Slices[str]:
    for _ in range(slices):
        served.append(client)
        assert go_on.wait(60)
        yield
    return client


@pytest.mark.parametrize(("queue", "share"), [("questions", 10), ("forms", 2), ("embeddings", 2), ("documents", 4)])
def test_a_request_comes_in_turn_with_the_many_of_another_client(queue: str, share: int) -> None:
    turns: Turns = getattr(make_app(None, ApiKeys(), RequestLimits(), Metrics()).state.shared, queue)
    served, go_on = list[str](), threading.Event()

    async def serve() -> None:
        clients = (*[HOSTILE] * 30, OTHER)
        waiting = [asyncio.create_task(turns.run(client, work(client, served, go_on))) for client in clients]
        await asyncio.sleep(0.2)
        go_on.set()
        await asyncio.gather(*waiting)

    asyncio.run(serve())
    assert served.index(OTHER) <= share


def test_an_upload_comes_in_turn(tmp_path: Path, small_model: Path) -> None:
    """Each goes into a corpus of its own: those of one corpus are one client's."""
    served, go_on, turns = list[str](), threading.Event(), indexing_turns()

    class Watched(WordCounts):
        def __init__(self, client: str) -> None:
            self.client = client

        def embed(self, *given: Any) -> Any:
            served.append(self.client)
            assert go_on.wait(60)
            return super().embed(*given)

    with ExitStack() as stack:
        for number, client in enumerate(CLIENTS):
            rag = open_corpus(tmp_path / f"{number}", small_model, ratio=1.0)
            rag.embedder = Watched(client)
            documents = Documents(rag, compute_here, tenant=client, turns=turns)
            stack.callback(documents.close)
            documents.add([page("harbour", 2)])
        until(lambda: OTHER in served)
        go_on.set()
    assert served.index(OTHER) <= 2


def test_an_audit_comes_in_turn() -> None:
    auditor, served = Auditor(1.0, lambda audit: None, most=MANY), list[str]()

    def play(take: OnEvent) -> None:
        for event in (Started(Figures("blend", "", 9, 4)), Output((Token(5),)), Finished("stop")):
            take(event)

    for client in (OTHER, *CLIENTS):  # the first would be dropped for the latest
        play(auditor.watched(Prompt.of(PromptLayout((1,), (), (2,)), tenant=client), lambda event: None))
    while turn := auditor.next():
        served.append(turn[0].request.tenant)
        play(turn[1])
    assert served.count(OTHER) == 4  # two answers, each blended anew and in full
    assert served.index(OTHER) <= 2


def test_a_cache_comes_in_turn(make_engine: MakeEngine) -> None:
    engine, served, queued = make_engine(), list[str](), threading.Event()

    def encode(client: str, many: int) -> None:
        def on_done(one: CacheKey, error: Exception | None) -> None:
            served.append(client)
            assert error is None
            assert queued.wait(60)

        library = ChunkLibrary(engine.decoder, open_store("memory:"), (1, 2, 3))
        engine.encode(library, library.missing([(7, 9, number) for number in range(many)]), on_done)

    encode(HOSTILE, MANY)
    encode(OTHER, 1)
    queued.set()
    until(lambda: len(served) > MANY)
    assert served.index(OTHER) <= 2


async def begun(turns: Turns) -> None:
    while turns.running < 1:
        await asyncio.sleep(0.01)


def test_beyond_the_bounds_requests_are_refused() -> None:
    async def test() -> None:
        turns, log, go_on = Turns(1, 1, 4), list[str](), threading.Event()
        waiting = [asyncio.create_task(turns.run(name, work(name, log, go_on))) for name in ("ann", "ann", "bob")]
        await begun(turns)
        with pytest.raises(QueueFullError, match="2 requests wait already") as refused:
            await turns.run("ann", work("ann", log, go_on))
        assert refused.value.retry_after_s >= 1
        waiting.append(asyncio.create_task(turns.run("cid", work("cid", log, go_on))))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="4 requests wait already"):
            await turns.run("dan", work("dan", log, go_on))
        go_on.set()
        await asyncio.gather(*waiting)
        assert await turns.run("ann", work("ann", log, go_on)) == "ann"

    asyncio.run(test())


def test_who_leaves_or_fails_gives_its_place_back() -> None:
    def fails() -> Slices[None]:
        yield
        raise KeyError

    async def test() -> None:
        turns, log, go_on = Turns(1, 1, 10), list[str](), threading.Event()
        first = asyncio.create_task(turns.run("ann", work("ann", log, go_on)))
        await begun(turns)
        leaving = asyncio.create_task(turns.run("bob", work("bob", log, go_on)))
        await asyncio.sleep(0)
        leaving.cancel()
        go_on.set()
        assert await first == "ann"
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(KeyError):
            await turns.run("cid", fails())
        assert await turns.run("dan", work("dan", log, go_on, slices=2)) == "dan"
        assert log == ["ann", "dan", "dan"]

    asyncio.run(test())
