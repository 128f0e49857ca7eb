"""Reads the files of a folder in one process with limits, so that no file can end or fill the process that needs them.

    with ReaderProcess(FileLimits()) as reader:
        load_documents(folder, read=reader.read)

The process gets a line of JSON for each file and answers with lines of JSON: how far it is, then the parts of the file. It
reads many files. If a file ends it, or goes beyond its limits, a new process reads the next file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from blend_retrieval.document import valid_name
from blend_retrieval.limited import limit_memory, limit_processor, start_dialogue
from blend_retrieval.loading import OUT_OF_MEMORY, parts_of
from blend_retrieval.readers import Fault, Part, Parts, UnreadableError
from blend_retrieval.readers.progress import reported_to

_WALL_PER_CPU_SECOND = 10  # a busy machine gives this process a tenth of a processor
_ANSWER_BYTES = 1 << 20  # that are read at a time
_LEAST_MEMORY = 5 << 29

ShowProgress = Callable[[str, int, int, str], None]
"""(name of the file, what is read, of how much, the unit), as `readers.progress` reports it."""


@dataclass(frozen=True)
class FileLimits:
    """Limits of reading one file on one's own machine, far above what known files need.

    Attributes:
        seconds, seconds_a_megabyte: of a processor, for any file and for each 10^6 bytes of it.
        memory: bytes of address space; 0 for half of the machine's memory, but at least 2.5 GiB.

    """

    seconds: float = 60.0
    seconds_a_megabyte: float = 30.0
    memory: int = 0

    def seconds_for(self, nbytes: int) -> int:
        """Processor seconds for a file of this size."""
        return max(1, round(self.seconds + self.seconds_a_megabyte * nbytes / 1e6))

    @property
    def most_memory(self) -> int:
        """Bytes of address space."""
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return self.memory or max(half, _LEAST_MEMORY)


class _EndedError(Exception):
    """The process ended, or was ended, before it answered. by: its exit status, or None if it took too long."""

    def __init__(self, by: int | None) -> None:
        super().__init__()
        self.by = by


class _Process:
    """A running process, and the files that it has read."""

    def __init__(self, memory: int) -> None:
        self._popen = start_dialogue("blend_retrieval.reader_process")
        self._unread = b""
        self.files = 0
        self._write({"memory": memory})

    def ask(self, request: dict[str, Any], seconds: int, on_progress: Callable[..., None]) -> dict[str, Any]:
        """The answer to a request. Raises `_EndedError`."""
        self.files += 1
        self._write(request)
        deadline = time.monotonic() + seconds * _WALL_PER_CPU_SECOND
        while True:
            answer: dict[str, Any] = json.loads(self._line(deadline))
            if "progress" not in answer:
                return answer
            on_progress(*answer["progress"])

    def end(self) -> int:
        """End it, and wait for that; its exit status."""
        with self._popen as popen:
            popen.kill()
        return self._popen.returncode

    def _write(self, message: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(_encoded(message))
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise _EndedError(self._popen.wait()) from None

    def _line(self, deadline: float) -> str:
        assert self._popen.stdout is not None
        pipe = self._popen.stdout.fileno()
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _EndedError(None)
            piece = os.read(pipe, _ANSWER_BYTES)
            if not piece:
                raise _EndedError(self._popen.wait())
            pieces.append(piece)
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        return line.decode("utf-8", "surrogatepass")


class ReaderProcess:
    """Reads one file at a time, for one thread. Leaving the `with` block ends the process."""

    def __init__(self, limits: FileLimits | None = None, progress: ShowProgress | None = None) -> None:
        self._limits = limits or FileLimits()
        self._progress = progress
        self._process: _Process | None = None

    def __enter__(self) -> ReaderProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def read(self, path: Path, text_field: str) -> Parts:
        """The parts of a file, as `loading.parts_of` reads them here.

        Raises:
            UnreadableError: the file cannot be read, goes beyond the limits, or ends its process.
            OSError: no process can be started.
        """
        seconds = self._limits.seconds_for(_size(path))
        request = {
            "path": os.fsencode(path).decode("utf-8", "surrogateescape"),
            "text_field": text_field,
            "seconds": seconds,
        }
        while True:
            is_new = self._process is None
            try:
                answer = self._answer(request, seconds, path)
            except _EndedError as error:
                status = self._end()
                if is_new or error.by in (None, -signal.SIGXCPU):
                    raise UnreadableError(_reason(error.by, status, seconds)) from None
                continue  # the files before it may have left too little memory
            except BaseException:
                self._end()
                raise
            if answer.get("unreadable") == OUT_OF_MEMORY:
                self._end()
                if not is_new:
                    continue
            if "unreadable" in answer:
                raise UnreadableError(answer["unreadable"], is_there=answer["is_there"])
            return [_part(*fields) for fields in answer["parts"]]

    def _answer(self, request: dict[str, Any], seconds: int, path: Path) -> dict[str, Any]:
        if self._process is None:
            self._process = _Process(self._limits.most_memory)

        def show(done: int, total: int, unit: str) -> None:
            if self._progress is not None:
                self._progress(valid_name(path.name), done, total, unit)

        return self._process.ask(request, seconds, show)

    def _end(self) -> int | None:
        process, self._process = self._process, None
        return None if process is None else process.end()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it says why


def _reason(by: int | None, status: int | None, seconds: int) -> str:
    if by is None or by == -signal.SIGXCPU:
        return f"takes more than {seconds:,} s to be read: divide it"
    if by == -signal.SIGKILL:
        return "cannot be read: its reader was killed, perhaps because the machine's memory ran out"
    if by < 0:
        return f"cannot be read: it ended its reader ({signal.Signals(-by).name})"
    return f"cannot be read: it ended its reader (status {by})"


def _part(kind: str, *fields: Any) -> Part | Fault:
    return Part(*fields) if kind == "part" else Fault(*fields)


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


class _FileRequest(NamedTuple):
    """A file to be read. seconds: of a processor."""

    path: str
    text_field: str
    seconds: int


def main() -> None:
    """The process: reads the files that standard input names, and writes their parts to standard output."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a parser's output must not mix with the answers
    limit_memory(json.loads(requests.readline())["memory"])
    for line in requests:
        request = _FileRequest(**json.loads(line.decode("utf-8", "surrogatepass")))
        limit_processor(request.seconds)
        _answer_to(request, answers)


def _answer_to(request: _FileRequest, answers: BinaryIO) -> None:

    def send(message: dict[str, Any]) -> None:
        answers.write(_encoded(message))
        answers.flush()

    try:
        with reported_to(lambda *report: send({"progress": report})):
            parts = parts_of(Path(request.path), request.text_field)
        send({"parts": [["part" if isinstance(part, Part) else "fault", *part] for part in parts]})
    except UnreadableError as error:
        send({"unreadable": str(error), "is_there": error.is_there})
    except MemoryError:  # to write the answer
        send({"unreadable": OUT_OF_MEMORY, "is_there": True})


if __name__ == "__main__":
    main()
