"""Files and folders that only their owner may read."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_OTHERS = 0o077


def make_private_folder(path: Path) -> None:
    """Make a folder unless it is there, and the parents that it lacks, each for its owner alone. Raises OSError.

    `Path.mkdir` leaves the modes of parents to the umask.
    """
    if not path.parent.exists():
        make_private_folder(path.parent)
    path.mkdir(PRIVATE_FOLDER, exist_ok=True)


def make_private(path: Path) -> None:
    """Take the rights of group and others from a file or folder of ours. What is not ours, a link too, stays as it is."""
    with suppress(OSError):
        status = path.lstat()
        ours = hasattr(os, "geteuid") and status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
        if ours and status.st_mode & _OTHERS:
            path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
