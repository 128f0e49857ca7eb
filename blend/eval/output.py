"""Files that a user names for results: written whole or not at all, and checked before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blend.errors import ConfigError
from blend.files import check_creatable, write_atomically
from blend.text import json_text


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON value without NaN or infinity, as `write_whole` does."""
    write_whole(path, f"{json_text(document, indent=1, allow_nan=False)}\n".encode())


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
        folder = Path(os.path.realpath(path.parent))
        # /dev/stdout and /dev/fd/1 may lead to a file, but no file must take its place.
        is_device = folder == Path("/dev") or folder.is_relative_to("/proc")
        if is_device or (target.exists() and not target.is_file()):
            raise ConfigError(f"{path}: cannot be written (not a regular file); name another file")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield target
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); name another file") from error
