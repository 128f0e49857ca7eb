"""What disks and people do to small files, by name."""

import json
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]


def overwritten(start: int, content: bytes) -> Damage:
    """Bytes in the middle of the file are others."""

    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(content)

    return damage


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "a file").write_text("of somebody")


def _flipped(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


ANY = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "text": lambda path: path.write_text("this is no such file\n" * 500),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "folder": _folder,
    "lost": lambda path: path.unlink(),
}
BINARY = {**ANY, "header": overwritten(0, b"\xff" * 20), "flipped": _flipped}
JSON = {
    **ANY,
    "list": lambda path: path.write_text("[1, 2]"),
    "null": lambda path: path.write_text("null"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "wrong types": lambda path: path.write_text(json.dumps({name: [None] for name in json.loads(path.read_bytes())})),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}"),
}
SQLITE = {
    **ANY,
    "header": overwritten(0, b"Fqlite"),
    "page size": overwritten(16, b"\x00\x07"),
    "zeroed first page": overwritten(0, bytes(4096)),
    "zeroed second page": overwritten(4096, bytes(4096)),
}
