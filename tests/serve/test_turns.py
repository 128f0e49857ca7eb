"""Clients take turns: long or many requests of one hold up no other, and beyond a bound they are refused."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from blend.serve.events import QueueFullError
from blend.serve.turns import Slices, Turns


class ClosedError(Exception):
    pass


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


def test_a_short_request_comes_between_the_slices_of_long_ones() -> None:
    async def test() -> None:
        turns, log, go_on = Turns(1, 1, 10), list[str](), threading.Event()
        long = [asyncio.create_task(turns.run("ann", work("ann", 10, log, go_on))) for _ in range(4)]
        await begun(turns, 1)
        short = [asyncio.create_task(turns.run("bob", work("bob", 1, log))) for _ in range(2)]
        await asyncio.sleep(0)
        go_on.set()
        assert await asyncio.gather(*long, *short) == [*["ann"] * 4, *["bob"] * 2]
        assert log[:5] == ["ann", "ann", "bob", "ann", "bob"]
        assert len(log) == 42

    run(test)


def test_a_client_has_its_share_of_the_places() -> None:
    async def test() -> None:
        turns, log, go_on = Turns(4, 2, 20), list[str](), threading.Event()
        anns = [asyncio.create_task(turns.run("ann", work("ann", 1, log, go_on))) for _ in range(8)]
        await begun(turns, 2)
        assert await turns.run("bob", work("bob", 3, log)) == "bob"
        assert turns.running == 2
        assert log == ["bob"] * 3
        go_on.set()
        await asyncio.gather(*anns)
        assert turns.running == 0

    run(test)


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


def test_closing_ends_all_before_their_next_slice() -> None:
    async def test() -> None:
        turns, log, go_on = Turns(1, 1, 10), list[str](), threading.Event()
        going = [asyncio.create_task(turns.run(name, work(name, 3, log, go_on))) for name in ("ann", "bob")]
        await begun(turns, 1)
        turns.close(ClosedError)
        go_on.set()
        for task in (*going, asyncio.create_task(turns.run("cid", work("cid", 1, log)))):
            with pytest.raises(ClosedError):
                await task
        assert log == ["ann"]

    run(test)
