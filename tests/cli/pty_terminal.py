"""A pseudo terminal for commands, and what it would show."""

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from contextlib import suppress
from pathlib import Path

TERMINAL = {"TERM": "xterm-256color", "COLUMNS": ""}
_PIECE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+")


class Terminal:
    """A pseudo terminal that a command may have as its output; `shown` is all it was sent."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._master, self._slave = pty.openpty()
        self.path = Path(os.ttyname(self._slave))
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other side is closed
            while piece := os.read(self._master, 65536):
                self._pieces.append(piece)

    @property
    def so_far(self) -> str:
        return b"".join(self._pieces).decode(errors="ignore")

    @property
    def shown(self) -> str:
        os.close(self._slave)
        self._reader.join(10)
        return b"".join(self._pieces).decode()


def screens(shown: str, columns: int) -> list[list[str]]:
    """The lines on the screen of a terminal so wide after each piece of text that was sent to it, and at the end."""
    lines = [""]
    row = column = 0
    after = []
    for piece in (*_PIECE.findall(shown), ""):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            lines += [""] * (row - len(lines) + 1)
        elif re.fullmatch(r"\x1b\[\d*A", piece):
            row -= int(piece[2:-1] or 1)
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith("\x1b"):
            for sign in piece:
                if column == columns:
                    row, column = row + 1, 0
                    lines += [""] * (row - len(lines) + 1)
                lines[row] = lines[row][:column].ljust(column) + sign + lines[row][column + 1 :]
                column += 1
        if not piece.startswith("\x1b["):
            after.append("\n".join(map(str.rstrip, lines)).rstrip().split("\n"))
    return after
