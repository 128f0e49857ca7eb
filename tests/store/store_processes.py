"""Python programs that work on a store in processes of their own."""

import subprocess
import sys
import textwrap
from pathlib import Path

_PREAMBLE = """
import os, random, sys, time, torch
from pathlib import Path
from blend.errors import EntryDamagedError, StoreError
from blend.store import open_store
from blend.types import CacheIdentity, ChunkCache
torch.set_num_threads(1)
root, seed = Path(sys.argv[1]), 0

def key(number):
    return CacheIdentity("m", "float32", (1,)).key((number,))

def cache(number, writer=0, tokens=64):
    # Every element says which entry and which writer it belongs to.
    return ChunkCache(*[tuple(torch.full((2, tokens, 8), float(number * 100 + writer)) for _ in range(3))] * 2, start=1)
"""

# Several processes for the price of one import of torch; each goes on with the body under a seed of its own.
_FORK = """
children = []
for seed in range(int(sys.argv[2])):
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def run(root: Path, body: str, workers: int = 1) -> list[str]:
    """What the program has printed, word by word; it must succeed."""
    code = _PREAMBLE + (_FORK if workers > 1 else "") + textwrap.dedent(body)
    command = [sys.executable, "-c", code, str(root), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
