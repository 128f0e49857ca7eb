"""Where the checkout is, where a server may listen, and the path on which other processes find its packages."""

import os
import socket
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join(str(REPOSITORY / folder) for folder in ("", "kernels", "retrieval"))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
