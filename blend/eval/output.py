"""Files that a user names for results: written whole or not at all, and checked before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blend.errors import ConfigError
from blend.files import check_creatable, write_atomically


def write_whole(path: Path, content: bytes) -> None:
    """Replace what `path` holds, whole or not at all.

    Missing folders are made; where `path` is a link, the file behind it is replaced. The file has mode 0600, whatever was there
    before. Raises `ConfigError` when the place cannot be written.
    """
    with _target(path) as target:
        write_atomically(target, [content], durable=False)


def check_writable(path: Path) -> None:
    """Raise `ConfigError` where `write_whole` could not write; missing folders are made."""
    with _target(path) as target:
        check_creatable(target.parent)


@contextmanager
def _target(path: Path) -> Iterator[Path]:
    """The file that `path` leads to, in a folder that is there; what the operating system refuses is a `ConfigError`."""
    try:
        target = Path(os.path.realpath(path))
        if (target.exists() and not target.is_file()) or _names_devices(path):
            raise ConfigError(f"{path}: cannot be written (not a regular file); name another file")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield target
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); name another file") from error


def _names_devices(path: Path) -> bool:
    """Whether a path is /dev/stdout, /dev/fd/1 or the like: it may lead to a file, but no file must take its place."""
    parent = Path(os.path.realpath(path.parent))
    return parent == Path("/dev") or parent.is_relative_to("/proc")
