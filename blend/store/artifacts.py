"""Small named things that a disk store keeps beside its chunk caches, and the generation that tells readers of changes.

artifacts/<name>    one line "kvblend artifact 1 <xxh3-128 of name and content>", then the content as it was given
generation          a token that is drawn anew by every change of an artifact, and by `advance`
.writing            locked by whoever chooses and writes artifacts
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from blend.errors import EntryDamagedError, StoreError
from blend.store.base import require_artifact_name
from blend.store.root import unusable, write_atomically

_OPENING = b"kvblend artifact 1 "
WAIT_S = 600.0  # choosing and measuring takes minutes on a slow machine


class Artifacts:
    """Artifacts and generation of the store in `root`."""

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, root / "artifacts"

    @property
    def generation(self) -> str:
        """The token; empty before the first change."""
        try:
            return (self._root / "generation").read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise unusable(self._root, error) from None

    def advance(self) -> None:
        """Draw a new token."""
        self._write(self._root / "generation", [uuid.uuid4().hex.encode()])

    def read(self, name: str) -> bytes | None:
        """The content, its checksum verified; None when there is none."""
        try:
            raw = (self._folder / require_artifact_name(name)).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise EntryDamagedError(f"{name} in {self._root} cannot be read: {error.strerror}") from None
        opening, _, content = raw.partition(b"\n")
        if opening != _opening(name, content):
            raise EntryDamagedError(f"{name} in {self._root} is not what was written")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Replace the artifact, then draw a new token: who sees the token finds the artifact."""
        self._write(self._folder / require_artifact_name(name), [_opening(name, content) + b"\n", content])
        self.advance()

    def delete(self, name: str) -> None:
        """Unlink the file."""
        path = self._folder / require_artifact_name(name)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise unusable(self._root, error) from None
        self.advance()

    def names(self) -> Iterator[str]:
        """Names as the directory lists them."""
        try:
            return iter(sorted(path.name for path in self._folder.iterdir() if path.is_file()))
        except (FileNotFoundError, NotADirectoryError):
            return iter(())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A lock on a file, which ends with the process that holds it."""
        from filelock import FileLock, Timeout

        lock = FileLock(self._root / ".writing", timeout=WAIT_S)
        try:
            lock.acquire()
        except Timeout:
            raise StoreError(
                f"another process has been writing to {self._root} for {WAIT_S:g} s; wait for it and try again"
            ) from None
        except OSError as error:
            raise unusable(self._root, error) from None
        try:
            yield
        finally:
            lock.release()

    def _write(self, path: Path, blobs: list[bytes]) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, blobs, self._root / "tmp")
        except OSError as error:
            raise unusable(self._root, error) from None


def _opening(name: str, content: bytes) -> bytes:
    digest = xxhash.xxh3_128(name.encode() + b"\n")
    digest.update(content)
    return _OPENING + digest.hexdigest().encode()
