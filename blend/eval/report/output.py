"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blend.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft beside `path`, of the same suffix, that takes its place when the block ends well and else is removed.

    Missing folders are made. Raises `ConfigError` when the place cannot be written.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: cannot be written (not a regular file); name another file")
    draft = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); name another file") from error
    finally:
        with suppress(OSError):
            draft.unlink()
