"""A disk that is full or read-only, and memory that is short: accepted documents wait, and removed ones stay removed."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from changing import (
    LAST_S,
    WordCounts,
    add,
    caches,
    compute_here,
    delete,
    ids,
    left,
    open_corpus,
    page,
    states,
    status_of,
    until,
)

from blend import Rag
from blend.errors import StoreError
from blend.serve.documents.documents import Documents
from blend.serve.failures import NOT_WRITABLE
from blend.serve.http.errors import failure_of

Make = Callable[..., Documents]


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this user may not mount a file system: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def on_disk(disk: Path, small_model: Path) -> Rag:
    """A corpus on that file system, of two documents with all their caches."""
    made = open_corpus(disk / "store", small_model)
    documents = Documents(made, compute_here)
    add(documents, [page("harbour"), page("mill")])
    documents.close()
    return made


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing may be written in this folder meanwhile."""
    mount("--bind", str(folder), str(folder))
    try:
        mount("-o", "remount,ro,bind", str(folder))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, pages: int = 0, name: str = "filler") -> Path:
    """Fill a disk, but for so many pages."""
    filler = disk / name
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - pages * 4096))
    return filler


def same_after_restart(rag: Rag, documents: Documents, make: Make) -> Documents:
    """Another process's, which sees the same documents."""
    before = set(states(documents.listing()))
    documents.close()
    again = make(rag=rag)
    assert set(states(again.listing())) == before
    return again


def test_a_document_waits_while_the_disk_is_full(disk: Path, on_disk: Rag, make: Make) -> None:
    documents = make(rag=on_disk)
    assert documents.wait(LAST_S)
    filler = fill(disk, 2)
    documents.add([page("quarry", 2)])
    until(lambda: bool(documents.problem))
    documents = same_after_restart(on_disk, documents, make)
    until(lambda: bool(documents.problem))
    held = status_of(documents, "quarry.md")
    assert held.state in ("queued", "reading", "indexing")
    assert ids(on_disk) == {"harbour.md", "mill.md"}
    filler.unlink()
    until(lambda: ids(on_disk) == {"harbour.md", "mill.md", "quarry.md"})
    assert documents.wait(LAST_S)
    assert set(states(documents.listing()).values()) == {"ready"}
    assert left(on_disk) == []


class Short(WordCounts):
    """Memory is short while a quarry is embedded."""

    def __init__(self) -> None:
        self.short, self.tried = True, 0

    def embed(self, texts, progress=None):  # type: ignore[no-untyped-def]
        if self.short and any("quarry" in text for text in texts):
            self.tried += 1
            raise MemoryError
        return super().embed(texts, progress)


def test_a_document_waits_while_memory_is_short_and_others_go_on(rag: Rag, make: Make) -> None:
    rag.embedder = embedder = Short()
    documents = make()
    documents.add([page(topic, 2) for topic in ("harbour", "quarry", "mill")])
    until(lambda: (rag.index_dir / "manifest.json").exists() and ids(rag) == {"harbour.md", "mill.md"})
    documents.add([page("quarry", 3)])  # the later one is to stay
    held = same_after_restart(rag, documents, make)
    tried = embedder.tried
    until(lambda: embedder.tried > tried)
    assert states(held.listing())["quarry.md"] in ("queued", "reading", "indexing")
    embedder.short = False
    until(lambda: set(states(held.listing()).values()) == {"ready"})
    assert any("number 2" in chunk.text for chunk in rag.index.chunks if chunk.document_id == "quarry.md")
    assert left(rag) == []


@pytest.mark.parametrize("pages", [0, 2, 5])
def test_a_document_is_deleted_on_a_full_disk_and_makes_room(disk: Path, on_disk: Rag, make: Make, pages: int) -> None:
    documents = make(rag=on_disk)
    assert documents.wait(LAST_S)
    before = caches(on_disk)
    fill(disk, pages)
    assert delete(documents, "mill.md")
    assert ids(on_disk) == {"harbour.md"}
    assert caches(on_disk) < before
    add(documents, [page("quarry", 2)])
    documents = same_after_restart(on_disk, documents, make)
    assert set(states(documents.listing())) == {"harbour.md", "quarry.md"}


def test_a_document_that_waits_is_deleted_on_a_full_disk(disk: Path, on_disk: Rag, make: Make) -> None:
    documents = make(rag=on_disk)
    assert documents.wait(LAST_S)
    fill(disk, 2)
    documents.add([page("quarry", 2)])
    until(lambda: bool(documents.problem))
    fill(disk, name="more")
    assert delete(documents, "quarry.md")
    documents = same_after_restart(on_disk, documents, make)
    assert set(states(documents.listing())) == {"harbour.md", "mill.md"}


def test_a_removal_that_cannot_be_kept_is_refused(on_disk: Rag, make: Make) -> None:
    documents = make(rag=on_disk)
    assert documents.wait(LAST_S)
    with (
        read_only(on_disk.index_dir.parent / "incoming"),
        pytest.raises(StoreError, match=r"cannot be kept in .*Read-only file system") as caught,
    ):
        delete(documents, "mill.md")
    assert failure_of(caught.value).message == NOT_WRITABLE
    assert states(documents.listing()) == {"harbour.md": "ready", "mill.md": "ready"}
    assert delete(documents, "mill.md")
    assert ids(on_disk) == {"harbour.md"}


def test_a_start_on_a_read_only_disk_names_what_cannot_be_written(disk: Path, on_disk: Rag, make: Make) -> None:
    mount("-o", "remount,ro", str(disk))
    documents = make(rag=on_disk)
    until(lambda: bool(documents.problem))
    incoming = on_disk.index_dir.parent / "incoming"
    assert documents.problem == f"documents cannot be kept in {incoming} (Read-only file system)"
    documents.close()


def test_a_removal_that_the_index_does_not_take_yet_is_tried_again(on_disk: Rag, make: Make) -> None:
    documents = make(rag=on_disk)
    assert documents.wait(LAST_S)
    with read_only(on_disk.index_dir):
        assert documents.delete("mill.md")
        until(lambda: bool(documents.problem))
        assert set(states(documents.listing())) == {"harbour.md"}
        documents = same_after_restart(on_disk, documents, make)
        until(lambda: bool(documents.problem))
    until(lambda: ids(on_disk) == {"harbour.md"})
    assert documents.wait(LAST_S)
    assert left(on_disk) == []
