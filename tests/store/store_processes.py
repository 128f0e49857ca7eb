"""Python programs that work on a store in processes of their own."""

import subprocess

PREAMBLE = """
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
FORK = """
children = []
for seed in range(int(sys.argv[2])):
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def finish(process: subprocess.Popen) -> list[str]:
    """What a process that must succeed has printed, word by word."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split()
