"""Clocks of servers over one store that jump: nothing is lost, nothing comes back, and the newer version of a document wins."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from changing import LAST_S, Make, delete, ids, left, states

from blend import Rag
from blend.serve.documents.documents import Documents
from blend.serve.documents.queue import UploadQueue
from blend.serve.documents.uploads import Upload
from blend.serve.request import GivenDocument

_HOUR_S = 3600
SetClock = Callable[[int], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Sets the clock of this process: hours from the right time."""
    now = time.time

    def shift(hours: int) -> None:
        monkeypatch.setattr(time, "time", lambda: now() + hours * _HOUR_S)
        monkeypatch.setattr(time, "time_ns", lambda: int((now() + hours * _HOUR_S) * 1e9))

    return shift


def text(name: str, words: str) -> GivenDocument:
    return GivenDocument(f"The {name} has {words}.", name, name)


def texts(rag: Rag) -> dict[str, str]:
    return {chunk.document_id: chunk.text for chunk in rag.index.chunks}


def ready(documents: Documents) -> None:
    assert documents.wait(LAST_S)
    assert set(states(documents).values()) <= {"ready"}


@pytest.mark.parametrize("clocks", [(0, -1, -2), (0, -30, 0), (0, 24, -24)], ids=["back", "month", "ahead and back"])
def test_servers_with_other_clocks_over_one_store(
    rag: Rag, make: Make, set_clock: SetClock, clocks: tuple[int, int, int]
) -> None:
    """Two servers take turns, then both are replaced; each step has another clock."""
    set_clock(clocks[0])
    first = make()
    first.add((), [text("harbour", "one bell"), text("mill", "two wheels")])
    ready(first)
    set_clock(clocks[1])
    second = make()
    second.add((), [text("harbour", "three bells"), text("quarry", "four cranes")])
    until_ready = (second, first)
    for documents in until_ready:
        ready(documents)
    assert delete(second, "mill")
    set_clock(clocks[2])
    first.add((), [text("harbour", "five bells")])
    for documents in until_ready:
        ready(documents)
        documents.close()
    last = make()
    ready(last)
    assert ids(rag) == {"harbour", "quarry"} == set(states(last))
    assert "five bells" in texts(rag)["harbour"]
    assert left(rag) == []


@pytest.mark.parametrize("hours", [-1, -24 * 400, 24 * 400])
def test_a_list_that_is_renewed_under_another_clock(tmp_path: Path, set_clock: SetClock, hours: int) -> None:
    """What the list's files say of themselves is in the order of the uploads, and no later number is used again."""
    folder = tmp_path / "incoming"
    queue = UploadQueue(folder)
    queue.put([Upload("text", "mill", "The mill", b"First."), Upload("text", "weir", "The weir", b"First.")])
    queue.put([Upload("text", "mill", "The mill", b"Second.")])
    last = max(queued.number for queued in queue.waiting())
    for shift in (0, hours, 0, hours):
        set_clock(shift)
        (folder / "uploads.sqlite").write_bytes(b"no list")
        queue = UploadQueue(folder)
        queue.sweep()
        words = f"After {shift} hours, behind {last}.".encode()
        queue.put([Upload("text", "weir", "The weir", words)])
        latest = max(queued.number for queued in queue.waiting())
        assert latest > last
        last = latest
        waiting = {queue.take(queued).id: queue.take(queued).data for queued in queue.waiting()}
        assert waiting == {"mill": b"Second.", "weir": words}
