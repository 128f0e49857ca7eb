"""Reads each file in a separate process with limits on time and memory.

The process loads the parser only, runs at low priority and ends with its file. It gets name and bytes on standard input
and answers with one JSON object. Nothing is on its command line, which other users could read.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blend_retrieval.document import Document, LoadedDocuments, SkippedDocument, valid_name
from blend_retrieval.loading import OUT_OF_MEMORY, load_bytes
from blend_retrieval.readers import TEXT_FIELD

SLOTS = threading.BoundedSemaphore(2)  # processes of all readers together; each may use all the memory of its limits
_NICENESS = 10
WALL_PER_CPU_SECOND = 10  # a busy machine gives this process a tenth of a processor
_LOOK_S = 0.2


class StoppedError(Exception):
    """The reader was closed before it read the file; the file has no fault."""


@dataclass(frozen=True)
class ReadingLimits:
    """Limits of reading one file: processor seconds, bytes of memory, characters of text."""

    seconds: float = 60.0
    memory: int = 4 << 30
    characters: int = 32 << 20


class IsolatedReader:
    """Reads files for one thread; any thread may close it."""

    def __init__(self, limits: ReadingLimits) -> None:
        self._limits, self._lock, self._closed = limits, threading.Lock(), False
        self.process: subprocess.Popen[bytes] | None = None

    def read(self, name: str, data: bytes, text_field: str = TEXT_FIELD) -> LoadedDocuments:
        """Like `load_bytes`; a file beyond the limits is in `skipped`.

        Raises `StoppedError` if the reader is closed, `OSError` if no process can be started.
        """
        while not SLOTS.acquire(timeout=_LOOK_S):
            self._require_open()
        try:
            return self._read(name, data, text_field)
        finally:
            SLOTS.release()

    def close(self) -> None:
        """Stop the running process. Later reads raise `StoppedError`."""
        with self._lock:
            self._closed = True
            if self.process is not None:
                self.process.kill()

    def _require_open(self) -> None:
        if self._closed:
            raise StoppedError

    def _read(self, name: str, data: bytes, text_field: str) -> LoadedDocuments:
        head = json.dumps({"name": name, "text_field": text_field, "limits": asdict(self._limits)}).encode()
        with self._lock:
            self._require_open()
            self.process = _start()
        late, answer = False, b""
        with self.process as process:
            try:
                answer, _ = process.communicate(head + b"\n" + data, self._limits.seconds * WALL_PER_CPU_SECOND)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                with self._lock:
                    process.kill()
                    self.process = None
        self._require_open()
        if late or process.returncode == -signal.SIGXCPU:
            return _left_out(name, f"takes more than {self._limits.seconds:,.0f} s to be read: divide it")
        if process.returncode:
            return _left_out(name, f"cannot be read: its reader ended with {process.returncode}")
        return _parsed(answer)


def _start() -> subprocess.Popen[bytes]:
    """Start the process in a new group, so that Ctrl-C does not reach it."""
    places = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-X", "utf8", "-m", "blend_retrieval.isolated"],
        env={**os.environ, "PYTHONPATH": places},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


def _left_out(name: str, reason: str) -> LoadedDocuments:
    return LoadedDocuments((), (SkippedDocument(valid_name(name), reason, (valid_name(name),)),))


def _parsed(answer: bytes) -> LoadedDocuments:
    read = json.loads(answer)
    documents = tuple(Document(*one) for one in read["documents"])
    skipped = tuple(SkippedDocument(*one)._replace(unread=tuple(one[2])) for one in read["skipped"])
    return LoadedDocuments(documents, skipped)


def main() -> None:
    """The process: reads one file from standard input and writes its documents to standard output."""
    request, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a parser's output must not mix with the answer
    head = json.loads(request.readline())
    limits = ReadingLimits(**head["limits"])
    _restrict(limits)
    with answers:
        answers.write(json.dumps(_answer(head["name"], request, head["text_field"], limits)).encode())


def _restrict(limits: ReadingLimits) -> None:
    import resource

    os.nice(_NICENESS)
    seconds = max(1, round(limits.seconds))
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, seconds)
    _limit(resource.RLIMIT_AS, limits.memory)


def _limit(kind: int, most: int) -> None:
    """Set a limit if the system supports it and has no lower one."""
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _answer(name: str, request: BinaryIO, text_field: str, limits: ReadingLimits) -> dict[str, Any]:
    try:
        found = load_bytes(name, request.read(), text_field)
    except MemoryError:  # the bytes alone exceed the limit
        found = _left_out(name, OUT_OF_MEMORY)
    if (characters := sum(len(one.text) for one in found.documents)) > limits.characters:
        reason = f"holds {characters:,} characters of text, more than {limits.characters:,}: divide it"
        found = _left_out(name, reason)
    return found._asdict()


if __name__ == "__main__":
    main()
