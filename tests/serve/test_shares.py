"""Whatever waits in the server: one client's many hold up another's single one for a few slices at most, and have a bound."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest
from changing import WordCounts, compute_here, open_corpus, page, until

from blend.chunks.library import ChunkLibrary
from blend.serve.audit import Auditor
from blend.serve.documents.documents import Documents, indexing_turns
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import Figures, Finished, OnEvent, Output, QueueFullError, Started, Token
from blend.serve.http.app import make_app
from blend.serve.http.requests import ApiKeys
from blend.serve.limits import RequestLimits
from blend.serve.metrics import Metrics
from blend.serve.prompt import Prompt
from blend.serve.turns import Slices, Turns
from blend.store import open_store
from blend.types import CacheKey, PromptLayout

HOSTILE, OTHER = "hostile", "other"
MANY = 5
CLIENTS = (*[HOSTILE] * MANY, OTHER)


def over_http(queue: str, request: pytest.FixtureRequest) -> list[str]:
    turns: Turns = getattr(make_app(None, ApiKeys(), RequestLimits(), Metrics()).state.shared, queue)
    served, go_on = list[str](), threading.Event()

    def work(client: str) -> Slices[None]:
        served.append(client)
        assert go_on.wait(60)
        yield from ()

    async def serve() -> None:
        clients = (*[HOSTILE] * 30, OTHER)
        waiting = [asyncio.create_task(turns.run(client, work(client))) for client in clients]
        await asyncio.sleep(0.2)
        go_on.set()
        await asyncio.gather(*waiting)

    asyncio.run(serve())
    return served


def uploads(queue: str, request: pytest.FixtureRequest) -> list[str]:
    """Each into a corpus of its own: those of one corpus are one client's."""
    folder, model = request.getfixturevalue("tmp_path"), request.getfixturevalue("small_model")
    served, go_on, turns = list[str](), threading.Event(), indexing_turns()

    class Watched(WordCounts):
        def __init__(self, client: str) -> None:
            self.client = client

        def embed(self, *given):  # type: ignore[no-untyped-def]
            served.append(self.client)
            assert go_on.wait(60)
            return super().embed(*given)

    with ExitStack() as stack:
        for number, client in enumerate(CLIENTS):
            rag = open_corpus(folder / f"{number}", model, ratio=1.0)
            rag.embedder = Watched(client)
            documents = Documents(rag, compute_here, tenant=client, turns=turns)
            stack.callback(documents.close)
            documents.add([page("harbour", 2)])
        until(lambda: OTHER in served)
        go_on.set()
    return served


def audits(queue: str, request: pytest.FixtureRequest) -> list[str]:
    auditor, served = Auditor(1.0, lambda audit: None, most=MANY), list[str]()
    answer = Started(Figures("blend", "", 9, 4)), Output((Token(5),)), Finished("stop")

    def play(take: OnEvent) -> None:
        for event in answer:
            take(event)

    for client in (OTHER, *CLIENTS):  # the first would be dropped for the latest
        play(auditor.watched(Prompt.of(PromptLayout((1,), (), (2,)), tenant=client), lambda event: None))
    while turn := auditor.next():
        served.append(turn[0].request.tenant)
        play(turn[1])
    assert served.count(OTHER) == 4  # two answers, each blended anew and in full
    return served


def caches(queue: str, request: pytest.FixtureRequest) -> list[str]:
    engine: EmbeddedEngine = request.getfixturevalue("make_engine")()
    served, queued = list[str](), threading.Event()

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
    return served


@pytest.mark.parametrize(
    ("queue", "serve"),
    [
        *((name, over_http) for name in ("questions", "forms", "embeddings", "documents")),
        ("uploads", uploads),
        ("audits", audits),
        ("caches", caches),
    ],
)
def test_one_item_comes_in_turn_with_the_many_of_another(
    queue: str, serve: Callable[[str, pytest.FixtureRequest], list[str]], request: pytest.FixtureRequest
) -> None:
    served = serve(queue, request)
    shares = {"questions": 10, "documents": 4}
    assert served.index(OTHER) <= shares.get(queue, 2), served


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def work(name: str, slices: int, log: list[str], go_on: threading.Event | None = None) -> Slices[str]:
    for _ in range(slices):
        assert go_on is None or go_on.wait(60)
        log.append(name)
        yield
    return name


async def begun(turns: Turns, count: int) -> None:
    while turns.running < count:
        await asyncio.sleep(0.01)


def test_beyond_the_bounds_requests_are_refused() -> None:
    async def test() -> None:
        turns, log, go_on = Turns(1, 1, 4), list[str](), threading.Event()
        waiting = [asyncio.create_task(turns.run(name, work(name, 1, log, go_on))) for name in ("ann", "ann", "bob")]
        await begun(turns, 1)
        with pytest.raises(QueueFullError, match="2 requests wait already") as refused:
            await turns.run("ann", work("ann", 1, log))
        assert refused.value.retry_after_s >= 1
        waiting.append(asyncio.create_task(turns.run("cid", work("cid", 1, log, go_on))))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="4 requests wait already"):
            await turns.run("dan", work("dan", 1, log))
        go_on.set()
        await asyncio.gather(*waiting)
        assert await turns.run("ann", work("ann", 1, log)) == "ann"

    run(test)


def test_who_leaves_or_fails_gives_its_place_back() -> None:
    async def test() -> None:
        turns, log, go_on = Turns(1, 1, 10), list[str](), threading.Event()
        first = asyncio.create_task(turns.run("ann", work("ann", 1, log, go_on)))
        await begun(turns, 1)
        leaving = asyncio.create_task(turns.run("bob", work("bob", 1, log)))
        await asyncio.sleep(0)
        leaving.cancel()
        go_on.set()
        assert await first == "ann"
        with pytest.raises(asyncio.CancelledError):
            await leaving

        def fails() -> Slices[None]:
            yield
            raise KeyError

        with pytest.raises(KeyError):
            await turns.run("cid", fails())
        assert await turns.run("dan", work("dan", 2, log)) == "dan"
        assert log == ["ann", "dan", "dan"]

    run(test)
