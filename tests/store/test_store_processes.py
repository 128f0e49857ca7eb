"""Real processes on one store: writers, readers, evictors, and writers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from blend.store import open_store

PREAMBLE = """
import os, random, sys, time, torch
from pathlib import Path
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


@pytest.fixture
def spawn():
    processes = []

    def start(root, body, workers=1):
        code = PREAMBLE + (FORK if workers > 1 else "") + textwrap.dedent(body)
        command = [sys.executable, "-c", code, str(root), str(workers)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split()


def test_concurrent_writers_readers_and_evictors(tmp_path, spawn):
    work = """
    store = open_store(root, budget_bytes=9 * 27_000)
    read, dice = 0, random.Random(seed)
    for step in range(60):
        number, other = dice.randrange(14), dice.randrange(14)
        store.put(key(number), cache(number, seed))
        reader = store.open(key(other))
        if reader is None:
            continue
        with reader:
            layers = [reader.layer(i) for i in range(3)]
            marks = {float(t.flatten()[0]) for pair in layers for t in pair}
            assert len(marks) == 1, marks
            mark = marks.pop()
            assert int(mark) // 100 == other and int(mark) % 100 < 4, mark
            assert all(bool((t == mark).all()) for pair in layers for t in pair)
            read += 1
    sys.stdout.write(f"{read}\n")  # in one piece, four processes share the pipe
    """
    reads = finish(spawn(tmp_path, work, workers=4))
    assert len(reads) == 4
    assert all(int(count) > 10 for count in reads)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert open_store(tmp_path).stats().entries >= 1


def test_opening_one_new_store_at_the_same_time(tmp_path, spawn):
    work = """
    for number in range(8):
        open_store(root / str(number)).put(key(seed), cache(seed))
    """
    finish(spawn(tmp_path, work, workers=3))
    assert all(open_store(tmp_path / str(number)).stats().entries == 3 for number in range(8))


def test_a_writer_killed_in_the_middle(tmp_path, spawn):
    work = """
    store = open_store(root)
    store.put(key(1), cache(1))
    written = 0
    def slow(descriptor, view, write=os.write):
        global written
        written += 1
        if written == 5:  # inside the data of the entry
            print("writing", flush=True)
            time.sleep(60)
        return write(descriptor, view[: max(1, len(view) // 2)])
    os.write = slow
    store.put(key(1), cache(1, writer=1, tokens=500))
    """
    process = spawn(tmp_path, work)
    assert process.stdout.readline() == "writing\n"
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    open_store(tmp_path)
    assert len(list((tmp_path / "tmp").iterdir())) == 1, "a live writer's file must stay"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    store = open_store(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []
    (only,) = store.keys()
    with store.open(only) as reader:
        assert reader.tokens == 64
        assert torch.equal(reader.layer(2)[1], torch.full((2, 64, 8), 100.0))


def test_writers_killed_at_random_moments(tmp_path, spawn):
    work = """
    store = open_store(root, budget_bytes=4_000_000)
    print("ready", flush=True)
    for number in range(100_000):
        store.put(key(number % 30), cache(number % 30, tokens=300))
    """
    for attempt in range(2):
        process = spawn(tmp_path, work)
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.15 + 0.07 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        store = open_store(tmp_path)
        assert list((tmp_path / "tmp").iterdir()) == []
        keys = list(store.keys())
        assert keys
        for key in keys:
            with store.open(key) as reader:
                first = reader.layer(0)[0]
                assert all(torch.equal(reader.layer(i)[1], first) for i in range(3))
