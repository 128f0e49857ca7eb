"""SQLite files that are damaged: what is noticed, and what is set aside."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from blend.files import set_aside
from blend.serve.databases import NewerDatabaseError, damage_of, renew, set_foreign_log_aside

QUERIES = ["SELECT name, size FROM things LIMIT 0"]


def database(path: Path, rows: int = 200, *, mode: str = "DELETE") -> Path:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(f"PRAGMA journal_mode = {mode}")
        file.execute("CREATE TABLE IF NOT EXISTS things (name TEXT, size INTEGER)")
        file.executemany("INSERT INTO things VALUES (?, ?)", [(f"name {row}" * 9, row) for row in range(rows)])
    return path


def overwrite(start: int, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(content)

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def other_table(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE others (name TEXT)")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "zeroed page": overwrite(4096, bytes(4096)),
    "zeroed first page": overwrite(0, bytes(4096)),
    "text": lambda path: path.write_text("no database at all\n" * 400),
    "cut": cut,
    "header": overwrite(0, b"Fqlite"),
    "page size": overwrite(16, b"\x00\x07"),
    "other table": other_table,
    "folder": folder,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_noticed_and_the_file_set_aside(tmp_path: Path, kind: str) -> None:
    path = database(tmp_path / "list.sqlite")
    assert damage_of(path, QUERIES) == ""
    DAMAGE[kind](path)
    before = path.read_bytes() if path.is_file() else None
    aside, why = renew(path, lambda: damage_of(path, QUERIES), lambda: database(path)) or (path, "")
    assert why
    assert aside.name.startswith("list.sqlite.damaged-")
    assert (aside.read_bytes() if aside.is_file() else None) == before
    assert damage_of(path, QUERIES) == ""
    assert renew(path, lambda: damage_of(path, QUERIES), pytest.fail) is None


def test_what_is_set_aside_takes_no_place_of_another(tmp_path: Path) -> None:
    for content in ("first", "second", "third"):
        (tmp_path / "list.sqlite").write_text(content)
        (tmp_path / "list.sqlite-journal").write_text(f"journal of the {content}")
        aside = set_aside(tmp_path / "list.sqlite")
        assert aside.read_text() == content
        assert aside.with_name(f"{aside.name}-journal").read_text() == f"journal of the {content}"
    assert len(list(tmp_path.iterdir())) == 6
    with pytest.raises(FileNotFoundError):
        set_aside(tmp_path / "list.sqlite")


def test_a_later_version_is_no_damage(tmp_path: Path) -> None:
    path = database(tmp_path / "list.sqlite")
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 3")
    assert damage_of(path, QUERIES, version=3) == ""
    with pytest.raises(NewerDatabaseError):
        damage_of(path, QUERIES, version=2)


def test_a_log_of_another_file_is_not_read(tmp_path: Path) -> None:
    path = database(tmp_path / "list.sqlite", 3)
    other = database(tmp_path / "other.sqlite", 0, mode="WAL")
    with closing(sqlite3.connect(other)) as file:
        with file:
            file.execute("INSERT INTO things VALUES ('of the other', 1)")
        log = tmp_path.joinpath("other.sqlite-wal").read_bytes()
    tmp_path.joinpath("list.sqlite-wal").write_bytes(log)
    set_foreign_log_aside(path)
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM things").fetchall() == [(3,)]
    assert [aside.read_bytes() for aside in tmp_path.glob("list.sqlite-wal.damaged-*")] == [log]
