"""Where `--json` and `--html` write: for their owner's eyes, whole, and refused before anything is loaded."""

import json
import os
import stat
from pathlib import Path

import pytest
from blend_process import one_line

TINY = ("--max-new-tokens", "2")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    chunks = [{"title": "Hall", "text": f"Hall {part} has {part + 3} doors and a bell."} for part in range(2)]
    path.write_text(json.dumps({"id": "q", "question": "How many doors?", "answers": ["3"], "chunks": chunks}))
    return path


def test_only_the_owner_may_read_what_is_written(blend, dataset, tmp_path):
    """They quote the documents, the question and the answers; also where a readable file stood before."""
    place = tmp_path / "out"
    place.mkdir()
    paths = {name: place / name for name in ("report.json", "analysis.html", "analysis.json")}
    paths["report.json"].write_text("old")
    paths["analysis.html"].write_text("old")
    for path in place.iterdir():
        path.chmod(0o666)
    assert blend("report", "--dataset", dataset, "--json", paths["report.json"], *TINY).code == 0
    outputs = ("--json", paths["analysis.json"], "--html", paths["analysis.html"])
    assert blend("analyze", "--dataset", dataset, *outputs).code == 0
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == dict.fromkeys(paths, 0o600)


def test_a_link_is_written_through(blend, dataset, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert blend("analyze", "--dataset", dataset, "--json", tmp_path / "link.json").code == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["records"]


@pytest.mark.parametrize(("command", "option"), [("report", "--json"), ("analyze", "--json"), ("analyze", "--html")])
def test_places_that_cannot_be_written_show_at_once(blend, dataset, tmp_path, command, option):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    os.mkfifo(tmp_path / "fifo.svg")
    (tmp_path / "file.svg").symlink_to("/dev/full")
    for place, told in (
        (tmp_path / "folder.svg", "not a regular file"),
        (tmp_path / "fifo.svg", "not a regular file"),
        (tmp_path / "file.svg", "not a regular file"),
        (Path("/dev/stdout.svg"), "not a regular file"),
        (Path("/proc/self/fd/out.svg"), "not a regular file"),
        (tmp_path / "file" / "out.svg", "cannot be written"),
        (tmp_path / f"{'long' * 80}.svg", "File name too long"),
        (Path("/sys/out.svg"), "cannot be written"),
    ):
        result = blend.here(command, "--dataset", dataset, option, place)
        assert told in result.refused(2)
        assert result.err.count("\n") == 1
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_standard_output_that_is_a_file_keeps_it(blend, dataset):
    """/dev/stdout leads to that file: a file moved into its place would lose what the command prints."""
    for call in (("report", "--json", "/dev/stdout"), ("analyze", "--json", "/dev/fd/1"), ("analyze", "--html", "-")):
        result = blend(*call, "--dataset", dataset)
        assert result.code == 2
        assert "regular file" in one_line(result.err) or "goes to a file" in one_line(result.err)
    assert not (blend.folder / "-").exists()


def test_two_outputs_in_one_file(blend, dataset, tmp_path):
    both = tmp_path / "both.svg"
    told = blend.here("analyze", "--json", both, "--html", both, "--dataset", dataset).refused(2)
    assert "name the same file" in told
