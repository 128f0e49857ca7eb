"""Files read in processes of their own: one that takes long, or much memory, costs nobody else anything.

Such a process loads the parser and nothing else, gives way to all others, and ends with its file. Name and bytes come to it on
standard input, and one JSON object goes back: nothing is in a command line, where everybody could read it.
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

_AT_ONCE = threading.BoundedSemaphore(
    2
)  # of all readers together, as each may take all the memory that its limits allow
_NICENESS = 10
_PATIENCE = 10  # times the processor time: a busy machine leaves a process of that niceness a tenth of a processor
_LOOK_S = 0.2


class StoppedError(Exception):
    """The reader was closed; the file is neither read nor at fault."""


@dataclass(frozen=True)
class ReadingLimits:
    """What reading one file may take. seconds: of processor time. memory: bytes. characters: of the texts in it."""

    seconds: float = 60.0
    memory: int = 4 << 30
    characters: int = 32 << 20


class ApartReader:
    """Reads files for one thread; any may close it."""

    def __init__(self, limits: ReadingLimits) -> None:
        self._limits, self._lock, self._closed = limits, threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, name: str, data: bytes) -> LoadedDocuments:
        """As `load_bytes` does; what goes beyond the limits is in `skipped`.

        Raises `StoppedError` when it is closed meanwhile, `OSError` where no process can be started.
        """
        while not _AT_ONCE.acquire(timeout=_LOOK_S):
            self._require_open()
        try:
            return self._read(name, data)
        finally:
            _AT_ONCE.release()

    def close(self) -> None:
        """End what is being read, and read nothing more."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _require_open(self) -> None:
        if self._closed:
            raise StoppedError

    def _read(self, name: str, data: bytes) -> LoadedDocuments:
        head = json.dumps({"name": name, "limits": asdict(self._limits)}).encode()
        with self._lock:
            self._require_open()
            self._process = _start()
        late, answer = False, b""
        with self._process as process:
            try:
                answer, _ = process.communicate(head + b"\n" + data, self._limits.seconds * _PATIENCE)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                with self._lock:
                    process.kill()
                    self._process = None
        self._require_open()
        if late or process.returncode == -signal.SIGXCPU:
            return _left_out(name, f"takes more than {self._limits.seconds:,.0f} s to be read: divide it")
        if process.returncode:
            return _left_out(name, f"cannot be read: its reader ended with {process.returncode}")
        return _parsed(answer)


def _start() -> subprocess.Popen[bytes]:
    """The process, in a group of its own: Ctrl-C is for who started it."""
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
    told = json.loads(answer)
    documents = tuple(Document(*one) for one in told["documents"])
    skipped = tuple(SkippedDocument(source, reason, tuple(unread)) for source, reason, unread in told["skipped"])
    return LoadedDocuments(documents, skipped)


def main() -> None:
    """The process: one file from standard input to standard output."""
    told, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a parser prints is no answer
    head = json.loads(told.readline())
    limits = ReadingLimits(**head["limits"])
    _give_way(limits)
    with answers:
        answers.write(json.dumps(_answer(head["name"], told, limits)).encode())


def _give_way(limits: ReadingLimits) -> None:
    import resource

    os.nice(_NICENESS)
    seconds = max(1, round(limits.seconds))
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, seconds)
    _limit(resource.RLIMIT_AS, limits.memory)


def _limit(kind: int, most: int) -> None:
    """Where the system knows it and has no lower limit."""
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _answer(name: str, told: BinaryIO, limits: ReadingLimits) -> dict[str, Any]:
    try:
        found = load_bytes(name, told.read())
    except MemoryError:  # for its bytes alone
        found = _left_out(name, OUT_OF_MEMORY)
    if (characters := sum(len(one.text) for one in found.documents)) > limits.characters:
        reason = f"holds {characters:,} characters of text, more than {limits.characters:,}: divide it"
        found = _left_out(name, reason)
    return found._asdict()


if __name__ == "__main__":
    main()
