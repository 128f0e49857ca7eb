"""Real processes on one store: writers, readers, evictors, and writers that are killed."""

from __future__ import annotations

import os
import signal
import time

import torch
from store_processes import finish

from blend.store import open_store


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
    sys.stdout.write(f"{read}\\n")  # in one piece, four processes share the pipe
    """
    reads = finish(spawn(tmp_path, work, workers=4))
    assert len(reads) == 4
    assert all(int(count) > 10 for count in reads)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert 0 < open_store(tmp_path).stats().nbytes <= 1.5 * 9 * 27_000


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
