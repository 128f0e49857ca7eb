"""Reads each file in a separate process with limits on time and memory.

The process gets name and bytes of the file on standard input and answers with one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO

from blend_retrieval.document import Document, LoadedDocuments, SkippedDocument, valid_name
from blend_retrieval.limited import restrict, start_process
from blend_retrieval.loading import OUT_OF_MEMORY, load_bytes
from blend_retrieval.readers import TEXT_FIELD, is_plain
from blend_retrieval.readers.zipped import declared_size

FIRST_MEMORY = 1 << 29
"""Bytes of memory of a first try. Readers of small files take 50 to 150 MB."""
SHORT_BYTES = 100_000
"""The longest plain text that is read without a process. The slowest takes 0.4 s of a processor."""
WALL_PER_CPU_SECOND = 10  # a busy machine gives this process a tenth of a processor
_LOOK_S = 0.2
_PACKED = 20  # bytes of an archive's text that take as long as one byte of another file


class StoppedError(Exception):
    """The reader was closed before it read the file; the file has no fault."""


class BeyondLimitsError(Exception):
    """The file takes more time or memory than its reader may have, or has ended its reader.

    loaded: the file as one that is left out, with the reason.
    """

    def __init__(self, loaded: LoadedDocuments) -> None:
        super().__init__(loaded.skipped[0].reason)
        self.loaded = loaded


@dataclass(frozen=True)
class ReadingLimits:
    """Limits of reading one file.

    Attributes:
        seconds, seconds_a_megabyte: of a processor, for any file and for each 10^6 bytes of it. In archives 10^6 bytes count
            that are packed, or 2 * 10^7 that are unpacked.
        most_seconds: for the largest file.
        first_seconds: for a first try of any file.
        memory: bytes of address space.
        characters: of its text.

    """

    seconds: float = 10.0
    seconds_a_megabyte: float = 12.0
    most_seconds: float = 120.0
    first_seconds: float = 3.0
    memory: int = 5 << 29
    characters: int = 32 << 20

    def seconds_for(self, nbytes: int, unpacked: int = 0) -> float:
        """Processor seconds for a file of this size. unpacked: bytes to which an archive unpacks."""
        counted = max(nbytes, unpacked / _PACKED)
        return min(self.seconds + self.seconds_a_megabyte * counted / 1e6, self.most_seconds)

    @property
    def of_first_try(self) -> ReadingLimits:
        """Limits under which nearly all files can be read."""
        seconds = min(self.most_seconds, self.first_seconds)
        memory = min(self.memory, FIRST_MEMORY)
        return replace(self, most_seconds=seconds, memory=memory)


def is_short(name: str, nbytes: int) -> bool:
    """Whether a file of this name and size may be read by `load_short`."""
    return nbytes <= SHORT_BYTES and is_plain(name)


def load_short(name: str, data: bytes) -> LoadedDocuments | None:
    """Read a short plain text in this process, like `load_bytes`. None if a process has to read it.

    Text in UTF-8 only has to be decoded. To detect other encodings, and to read front matter, parsers are needed.
    """
    if not is_short(name, len(data)) or b"\0" in data:
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    may_have_front_matter = text.lstrip().startswith("---")
    return None if may_have_front_matter else load_bytes(name, data)


class IsolatedReader:
    """Reads files for one thread; any thread may close it."""

    def __init__(self, limits: ReadingLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self.process: subprocess.Popen[bytes] | None = None

    def read(
        self, name: str, data: bytes, text_field: str = TEXT_FIELD, require: Callable[[], None] = lambda: None
    ) -> LoadedDocuments:
        """Read a file like `load_bytes`; a file beyond the limits is in `skipped`.

        Args:
            name: of the file.
            data: its bytes.
            text_field: the field of JSONL records that holds their text.
            require: called now and then; may raise to give up.

        Raises:
            StoppedError: the reader is closed.
            OSError: no process can be started.
        """
        try:
            return self.attempt(name, data, text_field, require)
        except BeyondLimitsError as error:
            return error.loaded

    def attempt(
        self, name: str, data: bytes, text_field: str = TEXT_FIELD, require: Callable[[], None] = lambda: None
    ) -> LoadedDocuments:
        """Read a file like `read`. Raises `BeyondLimitsError` too, for a file that higher limits may suffice for."""
        seconds = self._limits.seconds_for(len(data), declared_size(data))
        limits = {**asdict(self._limits), "seconds": seconds}
        request = {"name": name, "text_field": text_field, "limits": limits}
        head = json.dumps(request).encode()
        with self._lock:
            self._require_open()
            self.process = start_process("blend_retrieval.isolated", head + b"\n" + data)
        deadline = time.monotonic() + seconds * WALL_PER_CPU_SECOND
        late = False
        answer = None
        with self.process as process:
            try:
                while answer is None and not late:
                    with suppress(subprocess.TimeoutExpired):
                        answer, _ = process.communicate(timeout=_LOOK_S)
                    require()
                    late = time.monotonic() > deadline
            finally:
                with self._lock:
                    process.kill()
                    self.process = None
        self._require_open()
        if answer is None or process.returncode == -signal.SIGXCPU:
            raise BeyondLimitsError(_left_out(name, f"takes more than {seconds:,.0f} s to be read: divide it"))
        if process.returncode:
            reason = f"cannot be read: its reader ended with {process.returncode}"
            raise BeyondLimitsError(_left_out(name, reason))
        loaded = _parsed(answer)
        if any(OUT_OF_MEMORY in part.reason for part in loaded.skipped):
            raise BeyondLimitsError(loaded)
        return loaded

    def close(self) -> None:
        """Stop the running process. Later reads raise `StoppedError`."""
        with self._lock:
            self._closed = True
            if self.process is not None:
                self.process.kill()

    def _require_open(self) -> None:
        if self._closed:
            raise StoppedError


def _left_out(name: str, reason: str) -> LoadedDocuments:
    source = valid_name(name)
    return LoadedDocuments((), (SkippedDocument(source, reason, (source,)),))


def _parsed(answer: bytes) -> LoadedDocuments:
    loaded = json.loads(answer)
    documents = tuple(Document(*fields) for fields in loaded["documents"])
    skipped = []
    for source, reason, unread, lost in loaded["skipped"]:
        skipped.append(SkippedDocument(source, reason, tuple(unread), lost))
    return LoadedDocuments(documents, tuple(skipped))


def main() -> None:
    """The process: reads one file from standard input and writes its documents to standard output."""
    request = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a parser's output must not mix with the answer
    head = json.loads(request.readline())
    limits = ReadingLimits(**head["limits"])
    restrict(max(1, round(limits.seconds)), limits.memory)
    with answers:
        answer = _answer(head["name"], request, head["text_field"], limits)
        answers.write(json.dumps(answer).encode())


def _answer(name: str, request: BinaryIO, text_field: str, limits: ReadingLimits) -> dict[str, Any]:
    try:
        loaded = load_bytes(name, request.read(), text_field)
    except MemoryError:  # the bytes alone exceed the limit
        loaded = _left_out(name, OUT_OF_MEMORY)
    characters = sum(len(document.text) for document in loaded.documents)
    if characters > limits.characters:
        reason = f"holds {characters:,} characters of text, more than {limits.characters:,}: divide it"
        loaded = _left_out(name, reason)
    return loaded._asdict()


if __name__ == "__main__":
    main()
