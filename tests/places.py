"""Where the checkout is, where a server may listen, and the path on which other processes find its packages."""

import os
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join(str(REPOSITORY / folder) for folder in ("", "kernels", "retrieval"))


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, which finds the packages and the tests."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
