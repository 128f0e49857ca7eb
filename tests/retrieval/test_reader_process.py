"""A folder that is read in one process with limits: the same documents, and no file ends the reading of others."""

import os
import signal
import subprocess

import pytest
from pdfs import minimal_pdf

from blend_retrieval.document import SkippedDocument
from blend_retrieval.loading import load_documents
from blend_retrieval.reader_process import FileLimits, ReaderProcess
from blend_retrieval.readers import UnreadableError

SLOW = b"*a* ``b`` c\n\n" * 100_000  # many seconds for its parser
LARGE = b'{"text": "%s"}' % (b"word " * (20 << 20))


def write(folder, **files):
    for name, data in files.items():
        (folder / name.replace("_", ".")).write_bytes(data)


@pytest.fixture
def processes(monkeypatch):
    """Every process that was started, in order."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return started


def have_ended(processes):
    """Whether there were some, and each has ended and was waited for."""
    return bool(processes) and all(process.returncode is not None for process in processes)


def test_a_folder_is_read_as_in_this_process(processes, tmp_path):
    write(
        tmp_path,
        a_md="# Grüße\n\nA bell. 🔔".encode(),
        b_pdf=minimal_pdf("The harbour", "", title="Harbour"),
        c_jsonl=b'{"id": "x", "body": "The harbour."}\n{"body": "The mill \\ud800."}\nnonsense\n',
        d_txt=b"",
        e_docx=b"none",
        f_txt="Größe".encode("latin-1"),
        g_exe=b"A bell.",
        h_txt=b"A bell. " * 300_000,
    )
    (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"A bell.")
    os.mkfifo(tmp_path / "pipe.md")
    with ReaderProcess() as reader:
        loaded = load_documents(tmp_path, text_field="body", read=reader.read)
    assert loaded == load_documents(tmp_path, text_field="body")
    assert len(loaded.documents) == 6
    assert have_ended(processes)


@pytest.mark.parametrize(
    ("limits", "hostile", "reason"),
    [
        (FileLimits(seconds=1, seconds_a_megabyte=0), {"b_rst": SLOW}, "takes more than 1 s to be read: divide it"),
        (FileLimits(memory=200 << 20), {"b_jsonl": LARGE}, "needs more memory to be read than it may have: divide it"),
    ],
    ids=["seconds", "memory"],
)
def test_a_file_beyond_the_limits_is_skipped_alone(processes, tmp_path, limits, hostile, reason):
    write(tmp_path, a_md=b"A bell.", c_md=b"A mill.", d_pdf=minimal_pdf("A harbour"), **hostile)
    (name,) = (name.replace("_", ".") for name in hostile)
    with ReaderProcess(limits) as reader:
        loaded = load_documents(tmp_path, read=reader.read)
    assert [document.text for document in loaded.documents] == ["A bell.", "A mill.", "A harbour"]
    assert loaded.skipped == (SkippedDocument(str(tmp_path / name), reason, (name,)),)
    assert have_ended(processes)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "cannot be read: its reader was killed, perhaps because the machine's memory ran out"),
        (signal.SIGSEGV, "cannot be read: it ended its reader (SIGSEGV)"),
    ],
)
def test_a_file_that_ends_its_process_is_tried_in_a_new_one_and_then_skipped(processes, tmp_path, number, reason):
    write(tmp_path, a_md=b"A bell.", b_rst=SLOW)
    ended = set()

    def end(name, *_):
        processes[-1].send_signal(number)
        ended.add(processes[-1].pid)

    with ReaderProcess(progress=end) as reader:
        reader.read(tmp_path / "a.md", "text")
        write(tmp_path, b_csv=b"a,b\n" + b"1,2\n" * 1_200_000)
        with pytest.raises(UnreadableError) as error:
            reader.read(tmp_path / "b.csv", "text")
        assert str(error.value) == reason
        assert len(ended) == 2
        assert len(processes) == 2
        assert reader.read(tmp_path / "a.md", "text")[0].text == "A bell."
    assert have_ended(processes)


def test_giving_up_ends_the_process(processes, tmp_path):
    write(tmp_path, b_csv=b"a,b\n" + b"1,2\n" * 1_200_000)

    def give_up(*_):
        raise KeyboardInterrupt

    with ReaderProcess(progress=give_up) as reader, pytest.raises(KeyboardInterrupt):
        reader.read(tmp_path / "b.csv", "text")
    assert have_ended(processes)
