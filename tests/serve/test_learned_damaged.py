"""A damaged list of learned texts is set aside, and a new one begins."""

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from learned_bench import SIZE, Bench, change, size_of_text, text

from blend.errors import StoreError


def overwrite(start: int, content: bytes) -> Callable[[Path], None]:
    def change_bytes(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(content)

    return change_bytes


def other_tables(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE pieces (other TEXT)")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "zeroed page": overwrite(4096, bytes(4096)),
    "zeroed first page": overwrite(0, bytes(4096)),
    "text": lambda path: path.write_text("no database at all\n" * 400),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "header": overwrite(0, b"Fqlite"),
    "page size": overwrite(16, b"\x00\x07"),
    "other tables": other_tables,
    "folder": folder,
}


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_list_is_set_aside_and_a_new_one_begins(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "learned.sqlite"
    Bench(tmp_path).learn(text(1))
    DAMAGE[kind](path)
    content = path.read_bytes() if path.is_file() else None
    bench = Bench(tmp_path)
    (aside,) = tmp_path.glob("learned.sqlite.damaged-*")
    assert (aside.read_bytes() if aside.is_file() else None) == content, "nothing is deleted"
    assert logged(caplog) == ["learned_texts_set_aside"]
    assert (len(bench.learned), bench.found(text(1))) == (0, [])
    bench.learn(text(2))
    assert Bench(tmp_path).found(text(2)) == [(0, SIZE, 0)]
    assert len(logged(caplog)) == 1


@pytest.mark.parametrize("kind", ["zeroed page", "text", "cut", "header", "other tables"])
def test_a_list_that_is_damaged_while_it_is_used_begins_anew(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench, other = Bench(tmp_path), Bench(tmp_path)
    bench.learn(*map(text, range(40)))
    assert other.found(text(1))
    DAMAGE[kind](tmp_path / "learned.sqlite")
    for _ in range(2):  # the first request may be the one that notices
        with suppress(StoreError):
            bench.learn(text(50))
    assert logged(caplog) == ["learned_texts_set_aside"]
    assert len(list(tmp_path.glob("learned.sqlite.damaged-*"))) == 1
    for process in (bench, other):
        assert (process.found(text(50)), process.found(text(1))) == ([(0, SIZE, 0)], [])
    assert bench.learned.nbytes == size_of_text()


CHANGED = {
    "other bytes": "randomblob(4 * 64)",
    "fewer": "x'010203'",
    "text": "'words'",
    "none": "NULL",
    "zeros": "zeroblob(256)",
}


@pytest.mark.parametrize("tokens", CHANGED.values(), ids=CHANGED)
def test_changed_tokens_are_not_taken_for_the_text(tmp_path: Path, tokens: str) -> None:
    bench = Bench(tmp_path)
    bench.learn(text(1), text(2))
    change(tmp_path, f"UPDATE pieces SET tokens = {tokens} WHERE used = 1")
    bench = Bench(tmp_path)
    assert (bench.found(text(1)), bench.found(text(2))) == ([], [(0, SIZE, 0)])
    bench.learn(text(1))
    assert bench.found(text(1)) == [(0, SIZE, 0)]
