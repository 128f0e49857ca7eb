"""Processes with limits on time and memory, for work on data that may be hostile.

Such a process loads only its own module, runs at low priority and ends with its task. It gets the task on standard input
and answers on standard output. Nothing is on its command line, which other users could read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_NICENESS = 10


def start_process(module: str, task: bytes) -> subprocess.Popen[bytes]:
    """Run this module in a process of a new group, so that Ctrl-C does not reach it. Raises `OSError`.

    task: its standard input. A temporary file holds it: writing to a pipe would wait for the process.
    """
    places = [str(Path(place).absolute()) for place in sys.path]
    with tempfile.TemporaryFile() as file:
        file.write(task)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", "-m", module],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )


def restrict(seconds: int, memory: int) -> None:
    """Limit this process, at once: processor seconds, after which SIGXCPU ends it, and bytes of address space."""
    import resource

    os.nice(_NICENESS)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, seconds)
    _limit(resource.RLIMIT_AS, memory)


def _limit(kind: int, most: int) -> None:
    """Set a limit if the system supports it and has no lower one."""
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
