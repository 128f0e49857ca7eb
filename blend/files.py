"""Atomic writes, and removal of the temporary files of killed writers."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

from blend_retrieval.generations import make_private_folder as make_private_folder
from blend_retrieval.installation import install_command as install_command

STALE_AFTER_S = 3600.0
_Value = TypeVar("_Value")
_HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"
_NAME = re.compile(r"\.(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]+)-\w+\.tmp")


def cache_root() -> Path:
    """The folder of fetched files: `$KVBLEND_CACHE`, or `kvblend` in the platform's user cache directory."""
    if chosen := os.environ.get("KVBLEND_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvblend"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvblend"


GAINS = "speed.json"
LEAST_GAIN = 1.1  # of bfloat16 over float32; below it, float32's precision costs little


def measured_gains() -> dict[str, float]:
    """Speed of matrix products in bfloat16 over float32, for each CPU and size that was measured here."""
    return read_values(cache_root() / GAINS, float)


def read_values(path: Path, kind: type[_Value]) -> dict[str, _Value]:
    """The values of this type in a JSON object, by name; none if the file is missing or damaged."""
    document: object = None
    with suppress(OSError, ValueError, RecursionError):
        document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        return {}
    return {name: value for name, value in document.items() if isinstance(value, kind)}


def keep_value(path: Path, name: str, value: object) -> None:
    """Set a value of the JSON object in a file; None removes it. Nothing happens where that cannot be written."""
    values = read_values(path, object)
    values[name] = value
    document = {key: entry for key, entry in values.items() if entry is not None}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [json.dumps(document, indent=1).encode()], mode=None, durable=False)


def temporary_path(folder: Path) -> Path:
    """A new name in a folder that identifies the writing machine and process, so that `sweep` removes what they leave."""
    return folder / f".{_HOST}-{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp"


def write_atomically(
    path: Path,
    blobs: Iterable[bytes | memoryview],
    tmp: Path | None = None,
    mode: int | None = 0o600,
    *,
    durable: bool = True,
) -> None:
    """Write `blobs` to `path`, which holds either the old or the new content at any time. Raises OSError, leaving no file.

    Args:
        path: the file.
        blobs: its content.
        tmp: a folder of the same file system for the temporary file.
        mode: the file's permissions; None leaves them to the umask.
        durable: whether to sync to the disk first; without, a crash of the machine may leave an empty file.

    """
    with _part(tmp or path.parent) as part:
        _write(part, blobs, mode, durable=durable)
        part.replace(path)


def written_by(path: Path, write: Callable[[Path], int]) -> int:
    """Have a file written in another place, and move it to `path`; its bytes, 0 if `write` gave up. Raises OSError."""
    with _part(path.parent) as part:
        nbytes = write(part)
        if nbytes:
            part.replace(path)
        return nbytes


def write_once(path: Path, content: bytes, mode: int) -> None:
    """Write a file unless there is one. The last writer wins where the file system has no hard links. Raises OSError."""
    with _part(path.parent) as part:
        _write(part, [content], mode, durable=True)
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        except OSError:
            part.replace(path)


_JOURNALS = ("-journal", "-wal", "-shm")  # that SQLite keeps next to a file


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder, with SQLite's journals next to it, so that a new one can take its place.

    `uploads.sqlite` becomes `uploads.sqlite.damaged-2026-11-29-134502`, or that with a number if there is one. Nothing is
    deleted. Raises OSError where it cannot be renamed, FileNotFoundError if there is no such file.
    """
    os.lstat(path)
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    names = (f"{path.name}.damaged-{stamp}{end}" for end in ("", *(f"-{number}" for number in range(2, 10_000))))
    target = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    # First: SQLite would take what a journal holds into the file that comes next.
    for ending in _JOURNALS:
        with suppress(FileNotFoundError):
            path.with_name(path.name + ending).rename(target.with_name(target.name + ending))
    path.rename(target)
    return target


def check_creatable(folder: Path) -> None:
    """Raise OSError if `write_atomically` cannot create a file in `folder`."""
    with _part(folder) as part, _created(part, 0o600):
        pass


@contextmanager
def _part(folder: Path) -> Iterator[Path]:
    """A name for a temporary file, which is removed at the end unless it was moved."""
    part = temporary_path(folder)
    try:
        yield part
    finally:
        with suppress(OSError):
            part.unlink()


def _created(part: Path, mode: int | None) -> FileIO:
    allowed = 0o666 if mode is None else 0o600
    file = open(  # noqa: SIM115
        part, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, allowed)
    )
    if mode is not None:
        with suppress(OSError):  # a file system without permissions; the file is not wider than it was opened
            os.fchmod(file.fileno(), mode)
    return file


def _write(part: Path, blobs: Iterable[bytes | memoryview], mode: int | None, *, durable: bool) -> None:
    with _created(part, mode) as file:
        for blob in blobs:
            view = memoryview(blob)
            while view.nbytes:
                view = view[os.write(file.fileno(), view) :]
        if durable:
            os.fsync(file.fileno())


def sweep(folder: Path) -> None:
    """Remove temporary files of dead processes of this machine, and those an hour old, as far as that is allowed."""
    paths: list[Path] = []
    with suppress(OSError):
        paths.extend(folder.glob(".*.tmp"))
    for path in paths:
        with suppress(OSError):
            if not _is_abandoned(path):
                continue
            if stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _is_abandoned(path: Path) -> bool:
    name = _NAME.fullmatch(path.name)
    if name is None:
        return False
    if time.time() - path.lstat().st_mtime > STALE_AFTER_S:
        return True
    return name["host"] == _HOST and not _is_alive(int(name["pid"]))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True
