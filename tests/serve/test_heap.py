"""What is free between what is held goes back to the system."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

# In a process of its own: the heap of this one is full of what other tests left. Large buffers that were freed make glibc keep
# later ones in its heap instead of giving them back at once.
GAPS = """
import json, threading
from pathlib import Path
from blend.serve.heap import Heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

def fill():
    del (large := [bytearray(30 << 20)])[:]
    held = [bytearray(500_000) for _ in range(600)]
    held = held[::6]
    found["gaps"] = resident()
    Heap(3600).tidy()
    found["too soon"] = resident()
    Heap(0).tidy()
    found["tidy"] = resident()

found = {}
thread = threading.Thread(target=fill)
thread.start()
thread.join()
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps its heap in its own way")
def test_gaps_between_what_is_held_go_back():
    done = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["gaps"] > 300
    assert abs(found["too soon"] - found["gaps"]) < 10
    assert found["tidy"] < found["gaps"] - 200
