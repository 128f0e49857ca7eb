"""A lock between processes, on a file of the store."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from blend.errors import StoreError
from blend.store.files import StoreFiles
from blend.store.lease import WAIT_S

if TYPE_CHECKING:
    from filelock import BaseFileLock


@contextmanager
def locked(files: StoreFiles, name: str = ".writing") -> Iterator[None]:
    """Held by one thread of one process at a time; it ends with the process. Raises `StoreError` after ten minutes."""
    lock = _acquired(files, name)
    try:
        yield
    finally:
        lock.release()


def _acquired(files: StoreFiles, name: str) -> BaseFileLock:
    from filelock import FileLock, Timeout

    files.require_writable()
    path = files.root / name
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            files.remove(path)
    try:
        lock = FileLock(path, timeout=WAIT_S, mode=files.file_mode())
        lock.acquire()
    except Timeout:
        raise StoreError(
            f"another process has been writing to {files.root} for {WAIT_S:g} s; wait for it and try again"
        ) from None
    except OSError as error:
        raise files.failed("written", error) from None
    return lock
