"""Files that take long to be read hold up neither their own corpus nor other tenants."""

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from changing import LAST_S, Make, compute_here, delete, open_corpus, page, states, until

from blend.serve.documents.documents import Documents, indexing_turns
from blend.serve.documents.lanes import FIRST_TRIES, READER_MEMORY
from blend.serve.documents.uploads import DocumentLimits, UploadedFile
from blend.serve.turns import RecentUse, Turns
from blend_retrieval.isolated import ReadingLimits
from blend_retrieval.limited import start_process

SLOW = UploadedFile("slow.rst", b"*a* ``b`` c\n\n" * 100_000)  # many seconds for its parser
SHORT_TRIES = DocumentLimits(reading=ReadingLimits(first_seconds=1.0))
SPOKEN = b"1\n00:00:01,000 --> 00:00:04,000\nThe bell of Orr weighs 31 stone.\n"
CAPTIONS = UploadedFile("small.srt", SPOKEN)  # their reader starts quickly
SMALL = UploadedFile("small.txt", b"The bell of Orr weighs 31 stone.\n" * 60)


def test_short_files_of_the_corpus_go_ahead_of_one_that_takes_long(make: Make) -> None:
    documents = make(limits=SHORT_TRIES)
    documents.add([SLOW, CAPTIONS, page("harbour", 1)])
    until(lambda: states(documents)["small.srt"] == states(documents)["harbour.md"] == "ready")
    assert states(documents)["slow.rst"] in ("queued", "reading")
    documents.add([UploadedFile("late.srt", SPOKEN)])
    until(lambda: states(documents)["late.srt"] == "ready")
    assert states(documents)["slow.rst"] in ("queued", "reading")
    assert delete(documents, "slow.rst")
    assert documents.wait(LAST_S)
    assert states(documents) == dict.fromkeys(("harbour.md", "late.srt", "small.srt"), "ready")


def test_short_texts_need_no_reader(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by_processes = set()

    def start(module: str, content: bytes) -> Any:
        read_by_processes.add(json.loads(content.splitlines()[0])["name"])
        return start_process(module, content)

    monkeypatch.setattr("blend_retrieval.isolated.start_process", start)
    others = {
        "a.srt": SPOKEN,
        "latin.txt": "Stra\xdfe".encode("latin-1"),
        "front.md": b"---\ntitle: The bell\n---\nIt rings.",
        "long.txt": SMALL.data * 60,
    }
    texts = [page("harbour", 1), SMALL, UploadedFile("Makefile", b"all: bell"), UploadedFile("bell.py", b"# It rings.")]
    documents = make()
    documents.add([*(UploadedFile(*item) for item in others.items()), *texts])
    assert documents.wait(LAST_S)
    assert states(documents).items() >= {file.name: "ready" for file in texts}.items()
    assert read_by_processes == others.keys()


def test_short_texts_go_ahead_of_a_file_in_its_first_try(make: Make) -> None:
    documents = make(limits=DocumentLimits(reading=ReadingLimits(first_seconds=60.0)))
    documents.add([UploadedFile("slow.rst", SLOW.data[:600_000]), SMALL])  # few enough bytes for one batch
    until(lambda: states(documents)["small.txt"] == "ready")
    until(lambda: states(documents)["slow.rst"] == "reading")
    documents.add([page("harbour", 1)])
    until(lambda: states(documents)["harbour.md"] == "ready")
    assert states(documents)["slow.rst"] == "reading"


def test_three_tenants_with_such_files_leave_a_place_for_another(tmp_path: Path, small_model: Path) -> None:
    turns = indexing_turns()
    with ExitStack() as stack:
        corpora = []
        for number in range(FIRST_TRIES + 1):
            rag = open_corpus(tmp_path / f"{number}", small_model, ratio=1.0)
            corpora.append(Documents(rag, compute_here, tenant=f"tenant {number}", turns=turns, limits=SHORT_TRIES))
        for documents in corpora:
            stack.callback(documents.close)
        *hostile, honest = corpora
        for documents in hostile:
            documents.add([SLOW])
        until(lambda: states(hostile[0])["slow.rst"] == "reading")
        honest.add([CAPTIONS])
        until(lambda: states(honest) == {"small.srt": "ready"})
        assert all("ready" not in states(documents).values() for documents in hostile)


def test_clients_of_little_use_come_first_and_have_a_reserved_place() -> None:
    turns = Turns(3, 2, use=RecentUse(), reserved=1)
    for number in range(4):
        turns.leave(f"slow {number}", turns.line_up(f"slow {number}"), 10.0 + number)
    waiting = {number: turns.line_up(f"slow {number}") for number in (3, 2, 1, 0)}
    assert [number for number, place in waiting.items() if place.done()] == [3, 2], "one place stays free"
    assert turns.line_up("other").done()
    turns.leave("slow 3", waiting[3], 0.0)
    assert not waiting[0].done(), "the other client has taken the reserved place: two of three run"
    turns.leave("slow 2", waiting[2], 0.0)
    assert waiting[0].done()
    assert not waiting[1].done(), "of those that wait, the one of least use has its turn"


def test_the_readers_together_have_one_budget() -> None:
    limits = ReadingLimits()
    assert FIRST_TRIES * limits.of_first_try.memory + limits.memory == READER_MEMORY == 4 << 30


def test_processor_time_grows_with_the_file() -> None:
    limits = ReadingLimits()
    assert limits.seconds_for(3_000) < 10.1
    assert limits.seconds_for(5_000_000) >= 60
    assert limits.seconds_for(32 << 20) == 120
    assert limits.of_first_try.seconds_for(32 << 20) == 3


def test_closing_ends_all_readers(make: Make) -> None:
    documents = make()
    documents.add([SLOW])
    until(lambda: states(documents) == {"slow.rst": "reading"})
    documents.close()
    assert states(documents) == {"slow.rst": "queued"}
    until(lambda: not any(thread.name == "kvblend-reader" for thread in threading.enumerate()))
