"""Folders as they are found: deep, looping, too long for the system, and changing while they are read."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from places import run_python
from rendered import chunk_documents

from blend_retrieval.errors import DocumentsError
from blend_retrieval.index import ChunkIndex, update_index
from blend_retrieval.loading import load_documents
from blend_retrieval.readers import text


@contextmanager
def nested(folder, *names):
    """`top.md` and, far below, `deep.md`: made step by step, and removed by `rm`, as pytest could not."""
    before = Path.cwd()
    os.chdir(folder)
    Path("top.md").write_text("Here.")
    try:
        for name in names:
            Path(name).mkdir()
            os.chdir(name)
        Path("deep.md").write_text("Far down.")
    finally:
        os.chdir(before)
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", str(folder / names[0])], check=True)


def reasons(loaded):
    return {Path(skipped.source).name: skipped.reason for skipped in loaded.skipped}


def test_folders_are_walked_at_any_depth(tmp_path):
    with nested(tmp_path, *["d"] * 1100):
        loaded = load_documents(tmp_path)
    found = [(document.id, document.text) for document in loaded.documents]
    assert found == [("d/" * 1100 + "deep.md", "Far down."), ("top.md", "Here.")]
    assert loaded.skipped == ()


def just_too_long(folder):
    """Names of folders of which the last can be listed, while a file in it has too long a path."""
    room = os.pathconf("/", "PC_PATH_MAX") - 4 - len(str(folder))
    depth, rest = divmod(room - 100, 101)
    return [*["x" * 100] * depth, "x" * (rest // 2 + 49), "x" * (100 + rest - rest // 2 - 51)]


@pytest.mark.parametrize(
    ("names", "skipped"),
    [
        (lambda folder: ["long" * 50] * 30, ["cannot be listed (File name too long)"]),
        (just_too_long, ["cannot be read (File name too long)"]),
    ],
)
def test_paths_too_long_for_the_system_are_skipped(tmp_path, names, skipped):
    with nested(tmp_path, *names(tmp_path)):
        loaded = load_documents(tmp_path)
    assert [document.id for document in loaded.documents] == ["top.md"]
    assert [one.reason for one in loaded.skipped] == skipped


def test_links_in_circles_and_to_nowhere_are_skipped(tmp_path):
    (tmp_path / "good.md").write_text("Good.")
    (tmp_path / "sub").mkdir()
    for link, target in (("circle.md", "circle.md"), ("nowhere.md", "absent"), ("itself", "itself"), ("sub/up", ".")):
        (tmp_path / link).symlink_to(tmp_path / target)
    loaded = load_documents(tmp_path)
    assert [document.id for document in loaded.documents] == ["good.md"]
    assert set(reasons(loaded)) == {"circle.md", "nowhere.md"}
    assert all(reason.startswith("cannot be read (") for reason in reasons(loaded).values())


def test_links_out_of_the_folder_are_named(tmp_path):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for path in (folder, elsewhere):
        path.mkdir()
        (path / "a.md").write_text(f"Text of {path.name}.")
    (folder / "file.md").symlink_to(elsewhere / "a.md")
    (folder / "inside.md").symlink_to(folder / "a.md")
    (folder / "more").symlink_to(elsewhere, target_is_directory=True)
    (tmp_path / "entry").symlink_to(folder, target_is_directory=True)
    for root in (folder, tmp_path / "entry"):
        loaded = load_documents(root)
        assert [document.id for document in loaded.documents] == ["a.md", "file.md", "inside.md", "more/a.md"]
        [note] = loaded.skipped
        assert note.reason == (
            f"links that lead out of it were followed: file.md -> {elsewhere / 'a.md'}, more -> {elsewhere}"
        )
        assert note.lost == 0


def test_what_goes_or_changes_while_a_folder_is_read_is_skipped(tmp_path, monkeypatch):
    for name in ("1.txt", "2.txt", "3.txt", "4.txt", "5.txt", "sub/6.txt", "sub/deeper/7.txt", "z/8.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"Text {name}")

    def read_first_and_change(data, title):
        monkeypatch.undo()
        (tmp_path / "2.txt").unlink()
        (tmp_path / "3.txt").write_bytes(b"")
        (tmp_path / "4.txt").unlink()
        os.mkfifo(tmp_path / "4.txt")
        (tmp_path / "5.txt").unlink()
        (tmp_path / "5.txt").mkdir()
        shutil.rmtree(tmp_path / "sub")
        return text.read_text(data, title)

    monkeypatch.setattr(text, "read_text", read_first_and_change)
    loaded = load_documents(tmp_path)
    assert [document.id for document in loaded.documents] == ["1.txt", "z/8.txt"]
    assert reasons(loaded) == {
        "2.txt": "cannot be read (No such file or directory)",
        "3.txt": "is empty",
        "4.txt": "is not a regular file",
        "5.txt": "is not a regular file",
        "sub": "cannot be listed (No such file or directory)",
    }


LIMITED = """
import resource
from blend_retrieval import load_documents
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
loaded = load_documents({folder!r})
print([document.id for document in loaded.documents], [skipped.reason for skipped in loaded.skipped])
"""


def test_a_file_larger_than_the_memory_is_skipped(tmp_path):
    (tmp_path / "good.md").write_text("Good.")
    (tmp_path / "huge.txt").write_bytes(b"x")
    os.truncate(tmp_path / "huge.txt", 1 << 33)  # takes no room on the disk
    run = run_python(LIMITED.format(folder=str(tmp_path)))
    assert run.stdout == "['good.md'] ['is too large for the memory of this machine']\n", run.stderr


def test_names_that_are_no_utf_8_are_read_and_told_apart(tmp_path, bag):
    folder = os.fsencode(tmp_path / "docs")
    os.mkdir(folder)  # noqa: PTH102 - pathlib takes no bytes
    for name in (b"\xff.txt", b"\xfe.txt", b"\\udcff.txt", b"\xe4\xb8\xad.txt", b"\xffempty.md"):
        with open(os.path.join(folder, name), "wb") as file:  # noqa: PTH118, PTH123
            file.write(b"" if b"empty" in name else b"Words.")
    loaded = load_documents(tmp_path / "docs")
    assert len({document.id for document in loaded.documents}) == 4
    texts = [*loaded.documents, *(skipped[:2] for skipped in loaded.skipped), *(one.unread for one in loaded.skipped)]
    for words in (field for document in texts for field in document):
        words.encode()
    assert "\\udcfe.txt" in [document.id for document in loaded.documents]
    chunks = chunk_documents(loaded.documents)
    update_index(tmp_path / "index", chunks, bag)
    assert ChunkIndex.load(tmp_path / "index").chunks == chunks
    with pytest.raises(DocumentsError, match="no readable document") as caught:
        load_documents(Path(os.fsdecode(os.path.join(folder, b"\xffempty.md"))))  # noqa: PTH118
    str(caught.value).encode()


def test_titles_hold_no_control_characters(tmp_path):
    (tmp_path / "a.html").write_text("<title>One\x1b]0;x\x07 \u202etwo</title><p>Words.")
    (tmp_path / "b.md").write_text("# Three\x1b[1m\x9b four\n\nWords.")
    (tmp_path / "c.jsonl").write_text('{"title": "Five\\u001b[2J\\u0085six\\nseven", "text": "Words."}')
    (tmp_path / "d.md").write_text('---\ntitle: "\x1b[1m"\n---\n\nWords.')
    (tmp_path / "e\x1b[31m\u202e\nf.txt").write_text("Words.")
    titles = [document.title for document in load_documents(tmp_path).documents]
    assert titles == ["One]0;x two", "Three four", "Five six seven", "d", "e f"]
