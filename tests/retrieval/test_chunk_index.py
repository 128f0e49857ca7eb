import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from places import run_python
from rendered import chunks

from blend_retrieval.errors import (
    ChunkIndexError,
    IndexDamagedError,
    IndexMismatchError,
    IndexMissingError,
    IndexNewerError,
)
from blend_retrieval.generations import forget_index, generation_files, install_generation, is_begun, write_lock
from blend_retrieval.index import ChunkIndex, salvaged, update_index
from tests.store.reading import flip


def files(directory):
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def texts(index):
    return [chunk.text for chunk in index.chunks]


def test_search_agrees_with_a_full_product(tmp_path, bag):
    corpus = chunks(*(f"word{n % 7} word{n % 11} word{n}" for n in range(60)))
    update_index(tmp_path, corpus, bag)
    index = ChunkIndex.load(tmp_path)
    query = bag.embed(["word3 word5 word16"])[0]
    expected = index.vectors() @ query
    found = index.search(query, 10)
    assert [hit.score for hit in found] == pytest.approx(sorted(expected, reverse=True)[:10], abs=1e-6)
    assert all(expected[hit.row] == pytest.approx(hit.score, abs=1e-6) for hit in found)
    assert len(index.search(query, 1000)) == 60
    assert index.search(query, 0) == []


def test_update_embeds_only_what_is_new(tmp_path, bag):
    assert update_index(tmp_path, chunks("a", "b", "c"), bag)[:3] == (3, 0, 0)
    bag.embedded.clear()
    ticks = []
    update = update_index(tmp_path, chunks("d", "c", "a"), bag, lambda *step: ticks.append(step))
    assert update == (1, 2, 1, "")
    assert bag.embedded == ["Title\nd"]
    assert ticks == [("embed", 1, 1)]
    index = ChunkIndex.load(tmp_path)
    assert texts(index) == ["d", "c", "a"]
    np.testing.assert_array_equal(index.vectors(), bag.embed(["Title\nd", "Title\nc", "Title\na"]))


def test_update_with_nothing_new_writes_nothing(tmp_path, bag):
    update_index(tmp_path, chunks("a", "b"), bag)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert update_index(tmp_path, chunks("a", "b", "a"), bag) == (0, 2, 0, "")
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_an_empty_corpus_makes_an_empty_index(tmp_path, bag):
    update_index(tmp_path, chunks("a"), bag)
    assert update_index(tmp_path, [], bag) == (0, 0, 1, "")
    index = ChunkIndex.load(tmp_path, bag)
    assert len(index) == 0
    assert index.search(bag.embed(["a"])[0], 3) == []


def test_old_generations_are_removed(tmp_path, bag):
    for name in "abcd":
        update_index(tmp_path, chunks(name), bag)
    assert len(files(tmp_path)) == 5  # manifest, the current generation and the last


def test_another_embedder(tmp_path, bag, other_bag):
    update_index(tmp_path, chunks("a", "b"), bag)
    with pytest.raises(IndexMismatchError, match=r"made with the embedding model bag, not other; .*blend precompute"):
        ChunkIndex.load(tmp_path, other_bag)
    update = update_index(tmp_path, chunks("a", "b"), other_bag)
    assert update[:3] == (2, 0, 0)
    assert "embedding model bag" in update.reason
    assert ChunkIndex.load(tmp_path, other_bag).embedder == "other"


DAMAGE = {
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 5),
    "empty": lambda path: os.truncate(path, 0),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["chunks-", "index-", "manifest"])
def test_damage_is_found_named_and_mended(tmp_path, bag, kind, damage):
    update_index(tmp_path, chunks("a", "b"), bag)
    (victim,) = [path for path in tmp_path.iterdir() if path.name.startswith(kind)]
    DAMAGE[damage](victim)
    with pytest.raises((IndexDamagedError, IndexMissingError), match="blend precompute") as caught:
        ChunkIndex.load(tmp_path)
    assert "\n" not in str(caught.value)
    update = update_index(tmp_path, chunks("a", "b"), bag)
    assert update[:3] == (2, 0, 0)
    assert update.reason
    assert texts(ChunkIndex.load(tmp_path, bag)) == ["a", "b"]
    (aside,) = tmp_path.glob("damaged-*")
    assert len(files(aside)) == 3 - (damage == "gone")


@pytest.mark.parametrize("damage", [*DAMAGE, "digest"])
@pytest.mark.parametrize("kind", ["chunks-", "index-", "manifest"])
def test_texts_that_are_sound_are_salvaged(tmp_path, bag, kind, damage):
    """Never those of an earlier generation: it may hold what was deleted since."""
    update_index(tmp_path, chunks("a", "b"), bag)
    update_index(tmp_path, chunks("b", "c"), bag)
    victim = max(
        (path for path in tmp_path.iterdir() if path.name.startswith(kind)), key=lambda path: path.stat().st_mtime_ns
    )
    if damage == "digest":
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        manifest["files"] = {name: {"sha256": "0" * 64} for name in manifest["files"]}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    else:
        DAMAGE[damage](victim)
    with pytest.raises(IndexDamagedError):
        ChunkIndex.load(tmp_path)
    if kind == "chunks-" and damage != "digest":
        with pytest.raises(IndexDamagedError, match="so are its texts"):
            salvaged(tmp_path)
    else:
        assert [chunk.text for chunk in salvaged(tmp_path)] == ["b", "c"]


def test_without_a_manifest_half_a_generation_salvages_nothing(tmp_path, bag):
    update_index(tmp_path, chunks("a", "b"), bag)
    update_index(tmp_path, chunks("b", "c"), bag)
    latest = max(tmp_path.glob("chunks-*"), key=lambda path: path.stat().st_mtime_ns)
    latest.unlink()
    (tmp_path / "manifest.json").write_text("damaged")
    with pytest.raises(IndexDamagedError, match="so are its texts"):
        salvaged(tmp_path)


def test_an_earlier_generation_than_the_manifest_names_salvages_nothing(tmp_path, bag):
    update_index(tmp_path, chunks("a", "b"), bag)
    update_index(tmp_path, chunks("b", "c"), bag)
    for name in json.loads((tmp_path / "manifest.json").read_text())["files"]:
        (tmp_path / name).unlink()
    with pytest.raises(IndexDamagedError, match="so are its texts"):
        salvaged(tmp_path)


def test_a_later_version_of_an_index_is_not_damaged(tmp_path, bag):
    update_index(tmp_path, chunks("a", "b"), bag)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    for read in (ChunkIndex.load, salvaged):
        with pytest.raises(IndexNewerError, match="was written by a later version of kvblend: update this one"):
            read(tmp_path)


def test_a_folder_in_place_of_a_lock_is_moved(tmp_path, bag):
    (tmp_path / ".lock").mkdir()
    update_index(tmp_path, chunks("a"), bag)
    assert texts(ChunkIndex.load(tmp_path, bag)) == ["a"]
    assert len(list(tmp_path.glob(".lock.damaged-*"))) == 1


def test_an_index_whose_first_generation_is_being_written_is_not_there_yet(tmp_path, bag):
    update_index(tmp_path / "source", chunks("a", "b"), bag)
    manifest, paths = generation_files(tmp_path / "source")
    copied = []

    def read(name):
        with pytest.raises(IndexMissingError):
            ChunkIndex.load(tmp_path / "copy")
        assert not is_begun(tmp_path / "copy")
        copied.append(name)
        return paths[name].read_bytes()

    with write_lock(tmp_path / "copy"):
        install_generation(tmp_path / "copy", manifest, read)
    assert copied == list(paths)
    assert texts(ChunkIndex.load(tmp_path / "copy", bag)) == ["a", "b"]
    (tmp_path / "copy" / "manifest.json").unlink()
    with pytest.raises(IndexDamagedError, match=r"lost its manifest\.json"):
        ChunkIndex.load(tmp_path / "copy")


def test_an_index_whose_deletion_was_interrupted_is_gone(tmp_path, bag, monkeypatch):
    update_index(tmp_path, chunks("a", "b"), bag)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", killed)
        with pytest.raises(KeyboardInterrupt):
            forget_index(tmp_path)
    with pytest.raises(IndexMissingError):
        ChunkIndex.load(tmp_path)
    update_index(tmp_path, chunks("c"), bag)
    assert texts(ChunkIndex.load(tmp_path, bag)) == ["c"]


@pytest.mark.parametrize(
    "manifest",
    [
        "[" * 100_000,
        "[]",
        "{}",
        '{"format": 99}',
        '{"format": 1, "embedder": "x", "dimension": 2, "files": {"../x": {}}}',
    ],
)
def test_foreign_manifests_are_refused(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(IndexDamagedError, match="blend precompute"):
        ChunkIndex.load(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, bag):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ChunkIndexError, match="cannot be written"):
        update_index(tmp_path / "file" / "index", chunks("a"), bag)


def test_a_full_disk_leaves_the_old_index(tmp_path, bag, monkeypatch):
    update_index(tmp_path, chunks("a"), bag)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ChunkIndexError, match="No space left"):
        update_index(tmp_path, chunks("a", "b"), bag)
    monkeypatch.undo()
    assert texts(ChunkIndex.load(tmp_path, bag)) == ["a"]


KILLED = """
import os, signal
from pathlib import Path
from blend_retrieval.index import update_index
from tests.retrieval.conftest import BagOfWords
from tests.retrieval.rendered import chunks
left = {step}
def deadly(call):
    def wrapped(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapped
os.fsync, Path.replace, Path.unlink = deadly(os.fsync), deadly(Path.replace), deadly(Path.unlink)
update_index({directory!r}, chunks(*"bcd"), BagOfWords())
print("through")
"""


def test_killed_at_any_step_leaves_the_old_index_or_the_new_one(tmp_path, bag):
    seen, through = set(), False
    for step in range(20):
        directory = tmp_path / str(step)
        for old in ("x", "ab"):  # the first generation is there to be removed
            update_index(directory, chunks(*old), bag)
        run = run_python(KILLED.format(step=step, directory=str(directory)))
        through = "through" in run.stdout
        assert through or run.returncode == -9, run.stderr
        seen.add("".join(texts(ChunkIndex.load(directory, bag))))
        update = update_index(directory, chunks(*"bcd"), bag)
        assert update.reason == ""
        assert texts(ChunkIndex.load(directory, bag)) == ["b", "c", "d"]
        update_index(directory, chunks("z"), bag)
        assert not [name for name in files(directory) if name.endswith(".part")]
        if through:
            break
    assert through
    assert step >= 7  # three files, each flushed and renamed, and the removal
    assert seen == {"ab", "bcd"}


def test_readers_go_on_while_a_writer_writes(tmp_path, bag):
    update_index(tmp_path, chunks("a"), bag)
    corpora = [["a"], ["a", "b"], ["c"], ["c", "d", "e"]]
    stop, failures, reads = threading.Event(), [], []

    def read():
        while not stop.is_set():
            try:
                reads.append(texts(ChunkIndex.load(tmp_path)))
            except ChunkIndexError as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(24):
        update_index(tmp_path, chunks(*corpora[turn % 4]), bag)
    stop.set()
    reader.join()
    assert failures == []
    assert all(read in corpora for read in reads)
    assert len({tuple(read) for read in reads}) > 1


def test_what_was_replaced_while_it_was_opened_is_read_anew(tmp_path, bag, monkeypatch):
    update_index(tmp_path, chunks("a"), bag)
    read_bytes = Path.read_bytes

    def replaced(path):
        if path.name.startswith("chunks-"):
            monkeypatch.setattr(Path, "read_bytes", read_bytes)
            for name in "bc":  # the last generation stays beside the current one
                update_index(tmp_path, chunks(name), bag)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", replaced)
    assert texts(ChunkIndex.load(tmp_path)) == ["c"]


def test_two_writers_take_turns(tmp_path, bag, monkeypatch):
    from blend_retrieval import generations

    monkeypatch.setattr(generations, "LOCK_TIMEOUT", 0.05)
    with generations.write_lock(tmp_path), pytest.raises(ChunkIndexError, match="another process"):
        update_index(tmp_path, chunks("a"), bag)
    update_index(tmp_path, chunks("a"), bag)
