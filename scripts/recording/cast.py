"""What a terminal showed and when, as asciinema's casts of version 2: captured through a pseudo-terminal, written and read."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blend.errors import ConfigError

OUTPUT = "o"
INPUT = "i"
MARKER = "m"
ASKED = "asked"
FIRST_TOKEN = "first token"
_KEY_S = 0.04  # between two keys
_READ_S = 0.02


@dataclass(frozen=True)
class Event:
    """At `seconds` since the start: output of the terminal, a key that was pressed, or a marker with a name."""

    seconds: float
    kind: str
    text: str


@dataclass
class Cast:
    """A recording: a terminal of `columns` x `lines`, and its events in order of time. about: whatever else its head says."""

    columns: int
    lines: int
    about: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def marked(self, name: str) -> float:
        """Seconds of the first marker of this name. Raises `ConfigError` where there is none."""
        times = [event.seconds for event in self.events if event.kind == MARKER and event.text == name]
        if not times:
            raise ConfigError(f"the recording has no marker {name!r}: record it anew with scripts/record")
        return times[0]

    @property
    def first_token_s(self) -> float:
        """Seconds from the question to the first character of the answer."""
        return self.marked(FIRST_TOKEN) - self.marked(ASKED)

    def write(self, file: Path) -> None:
        """Write it as asciinema reads it."""
        head = {"version": 2, "width": self.columns, "height": self.lines, **self.about}
        rows = [head, *([round(event.seconds, 3), event.kind, event.text] for event in self.events)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_cast(file: Path) -> Cast:
    """The recording in a file. Raises `ConfigError` where it holds none."""
    try:
        head, *rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        columns, lines = int(head.pop("width")), int(head.pop("height"))
        if head.pop("version") != 2:
            raise ValueError
        events = [Event(float(seconds), str(kind), str(text)) for seconds, kind, text in rows]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{file} is no asciinema cast of version 2; scripts/record writes some") from None
    return Cast(columns, lines, head, events)


class Terminal:
    """A program in a pseudo-terminal. Use it in a `with` block, which ends the program."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, columns: int, lines: int
    ) -> None:
        self.cast = Cast(columns, lines)
        self._process, self._door = pty.fork()
        if self._process == 0:
            os.chdir(folder)
            os.execvpe(command[0], list(command), dict(environment))
        fcntl.ioctl(self._door, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._start = time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unread = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._door)

    def mark(self, name: str) -> None:
        """Note that something happens now."""
        self._note(MARKER, name)

    def press(self, keys: str) -> None:
        """Type these keys, one after the other, as a person does."""
        for key in keys:
            self._note(INPUT, key)
            os.write(self._door, key.encode())
            self.watch(_KEY_S)

    def enter(self) -> None:
        """Press the enter key. What was shown before is no answer to it."""
        self._unread = ""
        self._note(INPUT, "\r")
        os.write(self._door, b"\r")

    def watch(self, seconds: float) -> None:
        """Note what the program shows within so many seconds."""
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            self._read(min(remaining, _READ_S))

    def until(self, text: str, limit_s: float) -> None:
        """Wait until the program has shown this. Raises `ConfigError` where it does not come within so many seconds."""
        self._await(re.compile(re.escape(text)), limit_s)

    def until_answer(self, limit_s: float) -> None:
        """Wait for a character that is not blank, and mark it as the first token. Raises as `until` does."""
        self._await(re.compile(r"\S"), limit_s)
        self.mark(FIRST_TOKEN)

    def _await(self, wanted: re.Pattern[str], limit_s: float) -> None:
        """Read on until the pattern comes; what stands behind it waits for the next call."""
        end = time.monotonic() + limit_s
        while not (match := wanted.search(self._unread)):
            if time.monotonic() > end:
                raise ConfigError(
                    f"the terminal does not show {wanted.pattern!r} after {limit_s:.0f} s:\n{self._unread}"
                )
            self._read(_READ_S)
        self._unread = self._unread[match.end() :]

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._door], [], [], seconds)
        if not ready:
            return
        try:
            text = self._decoder.decode(os.read(self._door, 65536))
        except OSError:
            raise ConfigError("the program in the terminal has ended before it was done") from None
        self._note(OUTPUT, text)
        self._unread += text

    def _note(self, kind: str, text: str) -> None:
        self.cast.events.append(Event(time.monotonic() - self._start, kind, text))
