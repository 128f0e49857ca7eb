"""Processes with limits on time and memory, for work on data that may be hostile.

Such a process loads only its own module, runs at low priority and ends with its task. It gets the task on standard input
and answers on standard output. Nothing is on its command line, which other users could read.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

_NICENESS = 10
_OBJECTS = 100_000  # between two looks for cycles, which would take half of the time of a large Word file


def start_process(module: str, task: bytes) -> subprocess.Popen[bytes]:
    """Run this module in a process of a new group, so that Ctrl-C does not reach it. Raises `OSError`.

    task: its standard input. A temporary file holds it: writing to a pipe would wait for the process.
    """
    with tempfile.TemporaryFile() as file:
        file.write(task)
        file.seek(0)
        return _started(module, file)


def start_dialogue(module: str) -> subprocess.Popen[bytes]:
    """Run this module like `start_process`, with a pipe to its standard input. Raises `OSError`."""
    return _started(module, subprocess.PIPE)


def _started(module: str, standard_input: int | IO[bytes]) -> subprocess.Popen[bytes]:
    places = [str(Path(place).absolute()) for place in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-X", "utf8", "-m", module],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        stdin=standard_input,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


def restrict(seconds: int, memory: int) -> None:
    """Limit this process, at once: processor seconds, after which SIGXCPU ends it, and bytes of address space."""
    import resource

    os.nice(_NICENESS)
    _limit(resource.RLIMIT_CPU, seconds)
    limit_memory(memory)


def limit_memory(memory: int) -> None:
    """Limit this process to so many bytes of address space. It leaves no core file, and seldom looks for cycles."""
    import resource

    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory)
    gc.set_threshold(_OBJECTS)


def limit_processor(seconds: int) -> None:
    """Give this process so many processor seconds from now on, after which SIGXCPU ends it. Replaces the limit before."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = usage.ru_utime + usage.ru_stime
    _limit(resource.RLIMIT_CPU, math.ceil(used) + seconds)


def _limit(kind: int, most: int) -> None:
    """Set a limit if the system supports it and has no lower one."""
    import resource

    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
