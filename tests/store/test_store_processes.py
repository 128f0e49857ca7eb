"""Real processes on one store: writers, readers, evictors, and writers that are killed."""

import torch
from store_processes import run

from blend.store import open_store


def test_concurrent_writers_readers_and_evictors(tmp_path):
    work = """
    store = open_store(root, budget_bytes=9 * 27_000)
    read, dice = 0, random.Random(seed)
    for step in range(60):
        number, other = dice.randrange(14), dice.randrange(14)
        store.put(key(number), cache(number, seed))
        if seed == 0 and step % 10 == 0:
            store.prune([key(n) for n in range(0, 14, 2)], key(0).namespace)
            store.write_artifact("map", b"%d" % step)
        int(store.read_artifact("map") or 0)
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
    reads = run(tmp_path, work, workers=4)
    assert len(reads) == 4
    assert all(int(count) > 10 for count in reads)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert 0 < open_store(tmp_path).stats().nbytes <= 1.5 * 9 * 27_000


def test_opening_one_new_store_at_the_same_time(tmp_path):
    work = """
    for number in range(8):
        open_store(root / str(number)).put(key(seed), cache(seed))
    """
    run(tmp_path, work, workers=3)
    assert all(open_store(tmp_path / str(number)).stats().entries == 3 for number in range(8))


def test_killed_between_the_file_and_its_place(tmp_path):
    """Of an entry, of an artifact, and of a new store's manifest."""
    work = """
    def die(*args, **kwargs):
        os.kill(os.getpid(), 9)

    def killed(call, *names):
        child = os.fork()
        if child == 0:
            for holder, name in names:
                setattr(holder, name, die)
            call()
        assert os.waitpid(child, 0)[1] == 9

    store = open_store(root / "a")
    store.put(key(1), cache(1))
    store.write_artifact("map", b"content")
    before = store.generation
    moved = (Path, "replace")
    killed(lambda: store.put(key(1), cache(1, writer=3)), moved)
    killed(lambda: store.put(key(2), cache(2)), moved)
    killed(lambda: store.write_artifact("map", b"new"), moved)
    killed(lambda: store.write_artifact("other", b"new"), moved)
    killed(lambda: store.advance(), moved)
    killed(lambda: store.describe("abc", {"model": "tiny"}), moved)
    killed(lambda: open_store(root / "b"), moved)
    print(before)
    """
    (before,) = run(tmp_path, work)
    left = list(tmp_path.rglob(".*.tmp"))
    assert len(left) == 7
    assert {path.parent for path in left} == {tmp_path / "a" / "tmp", tmp_path / "b"}
    store = open_store(tmp_path / "a")
    assert open_store(tmp_path / "b").stats() == (0, 0)
    assert not list(tmp_path.rglob(".*.tmp"))
    (only,) = store.keys()
    with store.open(only) as reader:
        assert torch.equal(reader.layer(2)[1], torch.full((2, 64, 8), 100.0))
    assert list(store.artifacts()) == ["map"]
    assert store.read_artifact("map") == b"content"
    assert store.generation == before
    assert store.namespaces() == {only.namespace: {}}
