"""A directory that several machines mount: one where nothing is mounted is not a new, empty store.

Its `store.json` has an id besides, and each machine's disk tier remembers the one that it has seen (`seen`). A store is made by
the first who writes, and only where none was ever seen; where there was one, its absence is an outage.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

from blend.errors import StoreError, StoreUnreachableError
from blend.store.backend import Backend
from blend.store.files import MANIFEST, StoreFiles, make_root, store_id, tidy, unusable

_SEEN = "seen"
_MOST = 1 << 10


class MountedFiles(StoreFiles):
    """The files of the store at `root`, which may not be there now.

    local: this machine's disk tier, which remembers the store; without one this process does. above: the store that this one
    lies in, which is there when this one is made.
    """

    def __init__(self, root: Path, local: Backend | None = None, above: MountedFiles | None = None) -> None:
        super().__init__(root)
        self._local, self._above = local, above
        self._seen: str | None = None
        self._last: tuple[object, str] | None = None
        with suppress(StoreUnreachableError):
            if self._found() is not None:
                tidy(self)

    def require_present(self) -> None:
        """Raise `StoreUnreachableError` where the store that was seen here is not; one that was never made holds nothing."""
        found, seen = self._found(), self._remembered()
        if found == seen:
            return
        if seen is None:
            assert found is not None
            self._remember(found)
            return
        what = f"has no {MANIFEST}" if found is None else "holds another store than before"
        place = "" if self._local is None else f"; if that is on purpose, delete {self._local.place} to start anew"
        raise StoreUnreachableError(f"{self.root} {what}: see that the right file system is mounted{place}")

    def require_writable(self) -> None:
        """Have it made if it never was."""
        self.require_present()
        if self._found() is None:
            if self._above is not None:
                self._above.require_writable()
            try:
                make_root(self, uuid.uuid4().hex)
            except OSError as error:
                raise unusable(self.root, error) from None
            self.require_present()

    def open(self, path: Path) -> int | None:
        """As of any store, if it is this one."""
        self.require_present()
        return super().open(path)

    def scan(self, path: Path | str) -> list[os.DirEntry[str]]:
        """As of any store, if it is this one."""
        self.require_present()
        return super().scan(path)

    def failed(self, doing: str, error: OSError) -> StoreError:
        """A file that cannot be read is damage only where the store itself can be, which is asked of its server anew."""
        self._last = None
        return super().failed(doing, error)

    def _found(self) -> str | None:
        """The id of the store that is there now; read again when its manifest is another file."""
        try:
            info = (self.root / MANIFEST).stat()
            now = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)
            last = self._last
            if last is None or last[0] != now:
                self._last = last = (now, store_id(self.root, _content(self.root / MANIFEST)))
            return last[1]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unusable(self.root, error, "read") from None

    def _remembered(self) -> str | None:
        if self._seen is None and self._local is not None:
            content = self._local.read(_SEEN, _MOST)
            self._seen = None if content is None else content.decode(errors="replace")
        return self._seen

    def _remember(self, found: str) -> None:
        self._seen = found
        if self._local is not None:
            self._local.put(_SEEN, [found.encode()])


def _content(manifest: Path) -> bytes:
    """The first bytes of it, which the file server is asked for. Raises OSError."""
    with os.fdopen(os.open(manifest, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
        return file.read(_MOST) or b""
