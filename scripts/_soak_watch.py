"""What a process holds: memory, threads, open files, read from /proc; and whether its memory stays flat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Held(NamedTuple):
    """at_s: when it was looked at. rss: bytes."""

    at_s: float
    rss: int
    threads: int
    files: int


def look(pid: int, at_s: float) -> Held:
    """What the process holds now. Raises OSError when it is gone."""
    place = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
    files = sum(1 for _ in (place / "fd").iterdir())
    return Held(at_s, int(status["VmRSS"].split()[0]) << 10, int(status["Threads"]), files)


def growth(held: Sequence[Held]) -> float:
    """Bytes that memory grows by from the first look to the last, by Theil and Sen's line: the median of all pairs' slopes.

    A few looks in which a large request was held change nothing. 0 for fewer than two.
    """
    if len(held) < 2:
        return 0.0
    times, sizes = np.array([one.at_s for one in held]), np.array([one.rss for one in held], dtype=float)
    first, second = np.triu_indices(len(held), 1)
    slope = float(np.median((sizes[second] - sizes[first]) / (times[second] - times[first])))
    return slope * float(times[-1] - times[0])
