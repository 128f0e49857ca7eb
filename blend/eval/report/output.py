"""Files that are written whole or not at all, and that only their owner may read: they quote documents and questions."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blend.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft beside `path`, of the same suffix, that takes its place when the block ends well and else is removed.

    Missing folders are made; where `path` is a link, the file behind it is replaced. The file has mode 0600, whatever was there
    before. Raises `ConfigError` when the place cannot be written.
    """
    with _draft_for(path) as (draft, target):
        yield draft
        draft.replace(target)


def check_writable(path: Path) -> None:
    """Raise `ConfigError` where `whole_file` could not write; missing folders are made."""
    with _draft_for(path):
        pass


@contextmanager
def _draft_for(path: Path) -> Iterator[tuple[Path, Path]]:
    """An empty draft and the file that it is for; the draft is removed at the end unless it was moved."""
    draft: Path | None = None
    try:
        target = Path(os.path.realpath(path))
        if (target.exists() and not target.is_file()) or _names_devices(path):
            raise ConfigError(f"{path}: cannot be written (not a regular file); name another file")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made by mkstemp: its name cannot be foreseen, and nobody else may open it.
        descriptor, name = tempfile.mkstemp(f".part{target.suffix}", ".kvblend-", target.parent)
        os.close(descriptor)
        draft = Path(name)
        yield draft, target
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); name another file") from error
    finally:
        if draft is not None:
            with suppress(OSError):
                draft.unlink()


def _names_devices(path: Path) -> bool:
    """Whether a path is /dev/stdout, /dev/fd/1 or the like: it may lead to a file, but no file must take its place."""
    parent = Path(os.path.realpath(path.parent))
    return parent == Path("/dev") or parent.is_relative_to("/proc")
