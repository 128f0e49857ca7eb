"""A `blend serve` in a process of its own, and the environment of commands that examples run."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from places import PYTHONPATH


def environment(**more: str) -> dict[str, str]:
    """This process's without settings of kvblend, but with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVBLEND")}
    return {**kept, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def until(happened: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.1)


@contextmanager
def serving(folder: Path, env: dict[str, str], *options: str) -> Iterator[str]:
    """The address of a server that is ready. It runs in this folder and writes its log to the file "log" there."""
    command = [sys.executable, "-m", "blend", "serve", "--port", "0", *options]
    out, log = folder / "out", folder / "log"
    with (
        out.open("w") as standard,
        log.open("w") as errors,
        subprocess.Popen(command, cwd=folder, env=env, stdout=standard, stderr=errors) as process,
    ):
        try:
            until(lambda: "\n" in out.read_text() or process.poll() is not None)
            ready = re.fullmatch(r"Ready at (http://\S+)\n", out.read_text())
            assert ready is not None, log.read_text()
            yield ready[1]
        finally:
            process.terminate()
