"""Small named things that a disk store keeps beside its chunk caches, and the generation that tells readers of changes.

artifacts/<name>    one line "kvblend artifact 1 <digest of name and content>", then the content as it was given
generation          a token that is drawn anew by every change of an artifact, and by `advance`
.writing            locked by whoever chooses and writes artifacts
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from blend.errors import EntryDamagedError, StoreError
from blend.store.base import require_artifact_name
from blend.store.files import StoreFiles
from blend.store.seal import Seal

if TYPE_CHECKING:
    from filelock import BaseFileLock

_OPENING = b"kvblend artifact 1 "
WAIT_S = 600.0  # choosing and measuring takes minutes on a slow machine
MOST_BYTES = 1 << 30
_TOKEN_BYTES = 1 << 10


class Artifacts:
    """Artifacts and generation of the store that `files` belong to."""

    def __init__(self, files: StoreFiles, seal: Seal) -> None:
        self._files, self._seal = files, seal
        self._root, self._folder = files.root, files.root / "artifacts"

    @property
    def generation(self) -> str:
        """The token; empty before the first change, and where something else took its place."""
        try:
            token = self._files.read(self._root / "generation", _TOKEN_BYTES)
        except EntryDamagedError:
            return ""
        return (token or b"").decode("ascii", errors="replace")

    def advance(self) -> None:
        """Draw a new token."""
        self._files.write(self._root / "generation", [uuid.uuid4().hex.encode()])

    def read(self, name: str) -> bytes | None:
        """The content, its digest verified; None when there is none."""
        try:
            raw = self._files.read(self._path(name), MOST_BYTES)
        except EntryDamagedError as error:
            raise EntryDamagedError(f"{name} in {self._root} cannot be used: {error}") from None
        if raw is None:
            return None
        opening, _, content = raw.partition(b"\n")
        digest = opening.removeprefix(_OPENING)
        if digest == opening or not self._seal.holds(digest, "artifact", name.encode() + b"\n", content):
            raise EntryDamagedError(f"{name} in {self._root} cannot be used: {self._seal.foreign}")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Replace the artifact, then draw a new token: who sees the token finds the artifact."""
        path = self._path(name)
        if len(content) > MOST_BYTES // 2:
            raise StoreError(f"{name} takes {len(content)} bytes, an artifact {MOST_BYTES // 2} at most")
        digest = self._seal.digest("artifact", name.encode() + b"\n", content)
        self._files.write(path, [_OPENING + digest.encode() + b"\n", content])
        self.advance()

    def delete(self, name: str) -> None:
        """Remove the file."""
        if self._files.remove(self._path(name)):
            self.advance()

    def names(self) -> Iterator[str]:
        """Names as the directory lists them."""
        return iter(sorted(entry.name for entry in self._files.scan(self._folder) if _is_file(entry)))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock on a file, which ends with the process that holds it."""
        lock = self._acquired()
        try:
            yield
        finally:
            lock.release()

    def _acquired(self) -> BaseFileLock:
        from filelock import FileLock, Timeout

        self._files.require_present()
        path = self._root / ".writing"
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                self._files.remove(path)
        try:
            lock = FileLock(path, timeout=WAIT_S, mode=self._files.file_mode())
            lock.acquire()
        except Timeout:
            raise StoreError(
                f"another process has been writing to {self._root} for {WAIT_S:g} s; wait for it and try again"
            ) from None
        except OSError as error:
            raise self._files.failed("written", error) from None
        return lock

    def _path(self, name: str) -> Path:
        return self._folder / require_artifact_name(name)


def _is_file(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # a symbolic link that leads nowhere
        return entry.is_file()
    return False
