"""A list of uploads that is damaged: what waits goes on, nothing is lost, and nothing that was deleted comes back."""

import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from changing import LAST_S, Make, add, ids, left, page, states
from damages import BINARY, SQLITE, Damage

from blend import Rag
from blend.errors import StoreError
from blend.serve.documents.queue import UploadQueue
from blend.serve.documents.upload_files import file_name
from blend.serve.documents.uploads import Upload, UploadedFile
from blend_retrieval.errors import DocumentsError


def statement(path: Path, query: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(query)


def other_schema(path: Path) -> None:
    path.unlink()
    statement(path, "CREATE TABLE uploads (name TEXT)")


def changed(query: str) -> Damage:
    return lambda path: statement(path, query)


DAMAGE = {
    **SQLITE,
    "other schema": other_schema,
    "no table": changed("DROP TABLE gone"),
    "a row is lost": changed("DELETE FROM uploads WHERE id = 'harbour'"),
    "another id": changed("UPDATE uploads SET id = 'harbor' WHERE id = 'harbour'"),
    "another title": changed("UPDATE uploads SET title = 'The mill' WHERE id = 'harbour'"),
    "a deletion of another": changed("UPDATE uploads SET id = 'harbour' WHERE id = 'quarry' AND kind = 'delete'"),
    "no state": changed("UPDATE uploads SET state = 'qveued' WHERE id = 'harbour'"),
    "a text for a number": changed("UPDATE uploads SET place = 'first' WHERE id = 'harbour'"),
    "no chunk": changed("INSERT INTO gone VALUES ('[1, 2')"),
}


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    return tmp_path / "store" / "incoming"


@pytest.fixture
def queue(incoming: Path) -> UploadQueue:
    """A new version, a deletion, a text that was begun, and one that may be tried again."""
    queue = UploadQueue(incoming)
    queue.put([Upload("text", "weir", "The weir", b"It has four gates.")])
    queue.settle(queue.waiting()[0], "failed", "out of memory", whole=True)
    queue.put([Upload("text", "mill", "The mill", b"First version."), Upload("text", "quarry", "The quarry", b"Deep.")])
    queue.put(
        [
            Upload("text", "harbour", "The harbour", b"It has a bell."),
            Upload("file", "a.jsonl", "a", b"{}", text_field="x"),
        ]
    )
    queue.put([Upload("text", "mill", "The mill", b"Second version.")])
    queue.put([Upload("delete", "quarry")])
    queue.take(next(queued for queued in queue.waiting() if queued.upload.id == "harbour"))
    return queue


def waiting(queue: UploadQueue) -> list[Upload]:
    return [queue.take(queued) for queued in queue.waiting()]


def tries(queue: UploadQueue) -> dict[str, int]:
    return {queued.upload.id: queued.tries for queued in queue.waiting()}


@pytest.mark.parametrize("running", [False, True], ids=["at the start", "while running"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_what_waits_is_in_the_new_list(incoming: Path, queue: UploadQueue, kind: str, running: bool) -> None:
    counts = tries(queue)
    leaving = queue.leaving()
    expected = [queued.upload for queued in queue.waiting()]
    DAMAGE[kind](incoming / "uploads.sqlite")
    if not running:
        queue = UploadQueue(incoming)
    queue.sweep()  # as the owner does, at its start and every half a minute
    assert queue.leaving() == leaving == {"quarry"}
    assert [upload._replace(data=b"") for upload in waiting(queue)] == expected
    assert [upload.data for upload in waiting(queue)] == [b"It has a bell.", b"{}", b"Second version.", b""]
    assert {name: count - 2 for name, count in tries(queue).items()} == counts
    assert queue.retry("weir")
    for queued in queue.waiting():
        queue.settle(queued, "ready")
    assert not list(incoming.glob("*.upload"))
    asides = [path for path in incoming.iterdir() if ".damaged-" in path.name and "journal" not in path.name]
    assert len(asides) == (kind != "a row is lost")


def test_a_later_version_of_the_list_stays_as_it_is(incoming: Path, queue: UploadQueue) -> None:
    statement(incoming / "uploads.sqlite", "PRAGMA user_version = 2")
    for uploads in (queue, UploadQueue(incoming)):
        for change in (uploads.waiting, lambda uploads=uploads: uploads.put([Upload("text", "new", "New", b"text")])):
            with pytest.raises(
                StoreError, match=r"uploads\.sqlite was written by a later version of kvblend: update this one"
            ):
                change()
        assert uploads.leaving() == {"quarry"}
    statement(incoming / "uploads.sqlite", "PRAGMA user_version = 1")
    assert len(waiting(queue)) == 4


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """No user whom permissions do not bind."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_list_without_permission_is_not_damaged(
    incoming: Path, queue: UploadQueue, request: pytest.FixtureRequest
) -> None:
    """It stays at its place, and what is being deleted stays hidden."""
    for path in (incoming, *incoming.iterdir()):
        os.chown(path, 65534 if os.geteuid() == 0 else -1, -1)
    for folder in [*incoming.parents][:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    queue.path.chmod(0)
    request.getfixturevalue("unprivileged")
    uploads = UploadQueue(incoming)
    for change in (uploads.waiting, lambda: uploads.put([Upload("text", "new", "New", b"text")])):
        with pytest.raises(StoreError, match=r"documents cannot be kept in .*Permission denied"):
            change()
    assert uploads.leaving() == {"quarry"}
    queue.path.chmod(0o600)
    assert len(waiting(uploads)) == 4


def test_a_log_of_another_list_is_not_read(incoming: Path, queue: UploadQueue, tmp_path: Path) -> None:
    expected = [queued.upload for queued in queue.waiting()]
    other = UploadQueue(tmp_path / "other")
    other.put([Upload("delete", "harbour")])
    with closing(sqlite3.connect(other.path)) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("INSERT INTO gone VALUES ('[]')")
        database.commit()
        log = (tmp_path / "other" / "uploads.sqlite-wal").read_bytes()
    (incoming / "uploads.sqlite-wal").write_bytes(log)
    for uploads in (queue, UploadQueue(incoming)):
        assert [queued.upload for queued in uploads.waiting()] == expected
    assert [path.read_bytes() for path in incoming.glob("*-wal.damaged-*")] == [log]


def test_what_killed_servers_left_half_done(incoming: Path, queue: UploadQueue) -> None:
    """Files without rows come back, unless the list had done with them."""
    _, _, mill, quarry = queue.waiting()
    files = {path.name: path for path in incoming.glob("*.upload")}
    before = {name: path.read_bytes() for name, path in files.items()}
    (of_mill,) = (path for name, path in files.items() if name.startswith(f"{mill.number:012d}"))
    with of_mill.open("rb") as opened:  # its bytes go; what a server writes last into a file stays
        queue.settle(mill, "ready")
        useless = opened.read()
    older = file_name(quarry.number - 1, "quarry")
    (incoming / older).write_bytes(useless)
    of_mill.write_bytes(useless)
    statement(incoming / "uploads.sqlite", "DELETE FROM uploads WHERE id = 'a.jsonl'")
    again = UploadQueue(incoming)
    again.sweep()
    assert [queued.upload.id for queued in again.waiting()] == ["harbour", "a.jsonl", "quarry"]
    assert {path.name for path in incoming.glob("*.upload")} == before.keys() - {of_mill.name}


def test_a_new_version_that_was_deleted_does_not_come_back(incoming: Path, queue: UploadQueue) -> None:
    """A server that was killed behind the deletion's commit left the file of the upload, which no mark ends."""
    (file,) = (path for path in incoming.glob("*.upload") if b"harbour" in path.read_bytes())
    content = file.read_bytes()
    queue.put([Upload("delete", "harbour")])
    file.write_bytes(content)
    (incoming / "uploads.sqlite").write_text("damaged")
    again = UploadQueue(incoming)
    assert [queued.upload.kind for queued in again.waiting() if queued.upload.id == "harbour"] == ["delete"]
    assert not file.exists()


@pytest.mark.parametrize("kind", ["cut", "zeros", "flipped", "header", "text", "empty"])
def test_an_upload_whose_file_is_damaged_fails_alone(incoming: Path, queue: UploadQueue, kind: str) -> None:
    harbour = next(queued for queued in queue.waiting() if queued.upload.id == "harbour")
    file = next(path for path in incoming.glob("*.upload") if b"harbour" in path.read_bytes())
    BINARY[kind](file)
    with pytest.raises(DocumentsError, match="what was kept of it is damaged: hand it in again"):
        queue.take(harbour)
    (incoming / "uploads.sqlite").write_text("damaged")
    listed = {queued.upload.id for queued in UploadQueue(incoming).waiting()}
    assert listed - {"harbour"} == {"a.jsonl", "mill", "quarry"}
    assert file.exists() or list(incoming.glob(f"{file.name}.damaged-*"))


def test_uploads_of_an_earlier_version(incoming: Path) -> None:
    """They are read, and set aside if their list is damaged: they do not say what they are."""
    queue = UploadQueue(incoming)
    queue.put([Upload("text", "mill", "The mill", b"Old.")])
    (file,) = incoming.glob("*.upload")
    file.unlink()
    (incoming / "0123456789abcdef.upload").write_bytes(b"Old.")
    statement(queue.path, "UPDATE uploads SET bytes = '0123456789abcdef.upload'")
    statement(queue.path, "PRAGMA user_version = 0")
    again = UploadQueue(incoming)
    again.sweep()
    assert waiting(again) == [Upload("text", "mill", "The mill", b"Old.")]
    queue.path.write_text("damaged")
    assert UploadQueue(incoming).waiting() == []
    assert [path.read_bytes() for path in incoming.glob("0123456789abcdef.upload.damaged-*")] == [b"Old."]


def test_servers_that_notice_it_at_once_make_one_new_list(incoming: Path, queue: UploadQueue) -> None:
    expected = [queued.upload for queued in queue.waiting()]
    queue.path.write_text("damaged")
    servers = [UploadQueue(incoming) for _ in range(8)]
    uploads = [Upload("text", f"new {number}", "New", b"text") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda server, upload: server.put([upload]), servers, uploads))
    listed = [queued.upload for queued in queue.waiting()]
    assert listed[:4] == expected
    assert {upload.id for upload in listed[4:]} == {upload.id for upload in uploads}
    assert len([path for path in incoming.glob("uploads.sqlite.damaged-*") if path.read_bytes() == b"damaged"]) == 1


@pytest.mark.parametrize("kind", ["text", "zeroed second page", "empty"])
def test_a_server_indexes_what_waited(rag: Rag, make: Make, kind: str) -> None:
    documents = make()
    add(documents, [page("harbour", 2), page("mill", 2), page("quarry", 2)])
    documents.close()
    documents.add([page("orchard", 2), UploadedFile("mill.md", b"# The mill\n\nIt is closed.")])
    assert documents.delete("quarry.md")
    incoming = rag.index_dir.parent / "incoming"
    SQLITE[kind](incoming / "uploads.sqlite")
    again = make()
    assert "quarry.md" in again.leaving or "quarry.md" not in ids(rag)
    assert again.wait(LAST_S)
    assert states(again) == dict.fromkeys(("harbour.md", "mill.md", "orchard.md"), "ready")
    assert [chunk.text for chunk in rag.index.chunks if chunk.document_id == "mill.md"] == ["It is closed."]
    asides = {name for name in left(rag) if ".damaged-" not in name}
    assert asides <= {".uploads.sqlite.lock"}


def test_a_folder_in_place_of_the_owners_lock(rag: Rag, make: Make) -> None:
    incoming = rag.index_dir.parent / "incoming"
    (incoming / ".owner" / "sub").mkdir(parents=True)
    documents = make()
    add(documents, [page("harbour", 1)])
    assert states(documents) == {"harbour.md": "ready"}
    assert [path.name.partition("-")[0] for path in incoming.glob(".owner.*")] == [".owner.damaged"]


def test_nobody_sees_a_list_that_has_only_some_of_its_tables(tmp_path: Path) -> None:
    """It would be damaged, and be set aside while its first upload is written."""
    queue = UploadQueue(tmp_path / "incoming")
    queue.put([Upload("file", "bell.txt", "bell", b"A bell.")])
    transactions = int.from_bytes(queue.path.read_bytes()[24:28], "big")  # SQLite's file change counter
    assert transactions == 2, "one for all tables, one for the upload"


def test_nobody_sees_a_new_list_without_the_uploads_that_wait(incoming: Path, queue: UploadQueue) -> None:
    """Another server would give their numbers to its uploads, and theirs would be taken for old."""
    queue.path.write_text("damaged")
    assert UploadQueue(incoming).waiting()
    transactions = int.from_bytes(queue.path.read_bytes()[24:28], "big")
    assert transactions == 1


def test_an_upload_whose_number_another_has_is_kept(tmp_path: Path) -> None:
    queue = UploadQueue(tmp_path / "incoming")
    queue.put([Upload("text", "weir", "The weir", b"Four gates.")])
    (lost,) = queue.folder.glob("*.upload")
    weir = lost.rename(tmp_path / lost.name)
    queue.path.unlink()
    queue.put([Upload("text", "mill", "The mill", b"It is closed.")])
    weir.rename(lost)
    queue.sweep()
    assert [queued.upload.id for queued in queue.waiting()] == ["mill"]
    (aside,) = queue.folder.glob(f"{lost.name}.damaged-*")
    assert b"Four gates." in aside.read_bytes()
