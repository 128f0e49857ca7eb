"""Whatever waits in the server: one client's many hold up another's single one for a few slices at most."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from changing import WordCounts, compute_here, open_corpus, page, until

from blend.chunks.library import ChunkLibrary
from blend.serve.audit import Auditor
from blend.serve.documents.documents import Documents, indexing_turns
from blend.serve.engine.background import EncodingTask
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.events import Figures, Finished, OnEvent, Output, Started, Token
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

    def encode(client: str, many: int) -> EncodingTask:
        def on_done(one: CacheKey, error: Exception | None) -> None:
            served.append(client)
            assert error is None
            assert queued.wait(60)

        library = ChunkLibrary(engine.decoder, open_store("memory:"), (1, 2, 3))
        return engine.encode(library, library.missing([(7, 9, number) for number in range(many)]), on_done)

    tasks = encode(HOSTILE, MANY), encode(OTHER, 1)
    queued.set()
    assert all(task.ended.wait(60) for task in tasks)
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
