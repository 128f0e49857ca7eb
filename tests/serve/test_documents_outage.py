"""A disk that is full or read-only, and memory that is short: accepted documents wait, and removed ones stay removed."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from changing import LAST_S, Make, add, caches, delete, ids, left, open_corpus, page, states, status_of, until

from blend import Rag
from blend.errors import StoreError
from blend.serve.documents.documents import Documents
from blend.serve.failures import NOT_WRITABLE
from blend.serve.http.errors import failure_of


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
def rag(disk: Path, small_model: Path) -> Rag:
    """A corpus on that file system."""
    return open_corpus(disk / "store", small_model)


@pytest.fixture
def documents(make: Make) -> Documents:
    """Its two, with all their caches, in a process that came later."""
    first = make()
    add(first, [page("harbour"), page("mill")])
    first.close()
    second = make()
    assert second.wait(LAST_S)
    return second


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


def same_after_restart(documents: Documents, make: Make) -> Documents:
    """Another process's, which sees the same documents."""
    before = set(states(documents))
    documents.close()
    again = make()
    assert set(states(again)) == before
    return again


def test_a_document_waits_while_the_disk_is_full(disk: Path, rag: Rag, documents: Documents, make: Make) -> None:
    filler = fill(disk, 2)
    documents.add([page("quarry", 2)])
    until(lambda: bool(documents.problem))
    documents = same_after_restart(documents, make)
    until(lambda: bool(documents.problem))
    assert status_of(documents, "quarry.md").state in ("queued", "reading", "indexing")
    assert ids(rag) == {"harbour.md", "mill.md"}
    filler.unlink()
    until(lambda: ids(rag) == {"harbour.md", "mill.md", "quarry.md"})
    assert documents.wait(LAST_S)
    assert set(states(documents).values()) == {"ready"}
    assert left(rag) == []


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")])
def test_a_document_waits_while_memory_is_short_and_others_go_on(
    rag: Rag, documents: Documents, make: Make, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blend.serve.documents.worker.PAUSE_S", 0.5)
    tried: list[str] = []

    def short(text: str) -> None:
        if "quarry" in text:
            tried.append(text)
            raise error

    rag.embedder.before = short
    documents.add([page("quarry", 2), page("orchard", 2)])
    until(lambda: ids(rag) == {"harbour.md", "mill.md", "orchard.md"})
    documents.add([page("quarry", 3)])  # the later one is to stay
    held, before = same_after_restart(documents, make), len(tried)
    until(lambda: len(tried) > before)
    assert states(held)["quarry.md"] in ("queued", "reading", "indexing")
    rag.embedder.before = lambda text: None
    until(lambda: set(states(held).values()) == {"ready"})
    assert any("number 2" in chunk.text for chunk in rag.index.chunks if chunk.document_id == "quarry.md")
    assert left(rag) == []


@pytest.mark.parametrize("pages", [0, 2, 5])
def test_a_document_is_deleted_on_a_full_disk_and_makes_room(
    disk: Path, rag: Rag, documents: Documents, make: Make, pages: int
) -> None:
    before = caches(rag)
    fill(disk, pages)
    assert delete(documents, "mill.md")
    assert ids(rag) == {"harbour.md"}
    assert caches(rag) < before
    add(documents, [page("quarry", 2)])
    documents = same_after_restart(documents, make)
    assert set(states(documents)) == {"harbour.md", "quarry.md"}


def test_a_document_that_waits_is_deleted_on_a_full_disk(disk: Path, documents: Documents, make: Make) -> None:
    fill(disk, 2)
    documents.add([page("quarry", 2)])
    until(lambda: bool(documents.problem))
    fill(disk, name="more")
    assert delete(documents, "quarry.md")
    documents = same_after_restart(documents, make)
    assert set(states(documents)) == {"harbour.md", "mill.md"}


def test_a_removal_that_cannot_be_kept_is_refused(rag: Rag, documents: Documents) -> None:
    with (
        read_only(rag.index_dir.parent / "incoming"),
        pytest.raises(StoreError, match=r"cannot be kept in .*Read-only file system") as caught,
    ):
        delete(documents, "mill.md")
    assert failure_of(caught.value).message == NOT_WRITABLE
    assert states(documents) == {"harbour.md": "ready", "mill.md": "ready"}
    assert delete(documents, "mill.md")
    assert ids(rag) == {"harbour.md"}


def test_a_start_on_a_read_only_disk_names_what_cannot_be_written(
    disk: Path, rag: Rag, documents: Documents, make: Make
) -> None:
    documents.close()
    mount("-o", "remount,ro", str(disk))
    documents = make()
    until(lambda: bool(documents.problem))
    incoming = rag.index_dir.parent / "incoming"
    assert documents.problem == f"documents cannot be kept in {incoming} (Read-only file system)"


def test_a_removal_that_the_index_does_not_take_yet_is_tried_again(rag: Rag, documents: Documents, make: Make) -> None:
    with read_only(rag.index_dir):
        assert documents.delete("mill.md")
        until(lambda: bool(documents.problem))
        assert set(states(documents)) == {"harbour.md"}
        documents = same_after_restart(documents, make)
        until(lambda: bool(documents.problem))
    until(lambda: ids(rag) == {"harbour.md"})
    assert documents.wait(LAST_S)
    assert left(rag) == []
