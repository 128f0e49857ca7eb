"""Where the checkout is, and the path on which other processes find its packages."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join(str(REPOSITORY / folder) for folder in ("", "kernels", "retrieval"))
