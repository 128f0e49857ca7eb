"""Files read in processes of their own: the same documents, within limits, and at once given up."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from pdfs import minimal_pdf

from blend_retrieval.document import SkippedDocument
from blend_retrieval.isolated import IsolatedReader, ReadingLimits, StoppedError, load_short
from blend_retrieval.loading import load_bytes

SLOW = "slow.rst", b"*a* ``b`` c\n\n" * 100_000  # many seconds for its parser


def reasons(found):
    assert not found.documents
    return [one.reason for one in found.skipped]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a/ö.md", "# Grüße\n\nA bell. 🔔".encode()),
        ("a.pdf", minimal_pdf("The harbour", title="Harbour")),
        ("a.jsonl", b'{"id": "x", "text": "The harbour."}\n{"text": "The mill."}\nnonsense\n'),
        ("\udcff.txt", b"A bell."),
        ("a.exe", b"A bell."),
        ("longer-than-a-pipe.txt", b"A bell. " * 100_000),
    ],
)
def test_it_reads_what_is_read_here(name, data):
    found = IsolatedReader(ReadingLimits()).read(name, data)
    assert found == load_bytes(name, data)
    assert found.documents or found.skipped


@pytest.mark.parametrize(
    ("limits", "file", "reason"),
    [
        (ReadingLimits(seconds=1, seconds_a_megabyte=0), SLOW, "takes more than 1 s to be read: divide it"),
        (
            ReadingLimits(memory=200 << 20),
            ("a.jsonl", b'{"text": "%s"}' % (b"word " * (20 << 20))),
            "needs more memory to be read than it may have: divide it",
        ),
        (
            ReadingLimits(characters=100),
            ("a.txt", b"word " * 30),
            "holds 149 characters of text, more than 100: divide it",
        ),
    ],
    ids=["seconds", "memory", "characters"],
)
def test_what_goes_beyond_the_limits_is_left_out(limits, file, reason):
    reader = IsolatedReader(limits)
    assert reader.read(*file).skipped == (SkippedDocument(file[0], reason, (file[0],)),)
    assert len(reader.read("b.txt", b"A bell.").documents) == 1


def test_a_process_that_waits_is_ended_too(monkeypatch):
    monkeypatch.setattr("blend_retrieval.isolated.WALL_PER_CPU_SECOND", 0.02)
    assert reasons(IsolatedReader(ReadingLimits(seconds=10, seconds_a_megabyte=0)).read(*SLOW)) == [
        "takes more than 10 s to be read: divide it"
    ]


@contextmanager
def reading(reader):
    """The slow file under way: what becomes of it, and its process."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reader.read, *SLOW)
        while reader.process is None:
            time.sleep(0.001)
        yield found, reader.process


def test_a_parser_that_ends_its_process_is_told():
    with reading(IsolatedReader(ReadingLimits())) as (found, process):
        os.kill(process.pid, signal.SIGKILL)
        assert reasons(found.result(30)) == ["cannot be read: its reader ended with -9"]


def test_giving_up_ends_the_process():
    reader, processes = IsolatedReader(ReadingLimits()), []

    def give_up():
        processes.append(reader.process)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        reader.read(*SLOW, require=give_up)
    (process,) = processes
    assert process.returncode == -signal.SIGKILL


def test_closing_ends_what_is_read_and_blames_no_file():
    reader = IsolatedReader(ReadingLimits())
    with reading(reader) as (found, process):
        reader.close()
        with pytest.raises(StoppedError):
            found.result(30)
        assert process.returncode == -signal.SIGKILL
    with pytest.raises(StoppedError):
        reader.read("a.md", b"A bell.")


@pytest.mark.parametrize("name", ["a.md", "a.txt", "Makefile", "a.py", "README"])
def test_a_short_plain_text_needs_no_process(name):
    text = "# Grüße\r\n\nA bell. 🔔 ".encode()
    assert load_short(name, text) == load_bytes(name, text) == IsolatedReader(ReadingLimits()).read(name, text)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pdf", minimal_pdf("The harbour")),
        ("a.rst", b"A bell."),
        ("a.jsonl", b'{"text": "A bell."}'),
        ("a.exe", b"A bell."),
        ("a.txt", "Straße".encode("latin-1")),
        ("a.txt", "A bell.".encode("utf-16-le")),
        ("a.md", b"---\ntitle: A bell\n---\n"),
        ("a.md", b"\xef\xbb\xbf---\ntitle: A bell\n---\n"),
        ("a.md", b"\r\n---\r\ntitle: A bell\r\n---\r\n"),
        ("a.txt", b"A bell. " * 100_000),
    ],
)
def test_parsers_and_detectors_run_in_processes(name, data):
    assert load_short(name, data) is None
