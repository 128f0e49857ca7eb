"""Importing this puts the checkout's packages on the path, in front of installed ones."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "retrieval")]
