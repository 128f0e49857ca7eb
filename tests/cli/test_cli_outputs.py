"""Where `--json` and `--html` write: for their owner's eyes, whole, and refused before anything is loaded."""

import json
import os
import stat
from pathlib import Path

import pytest

TINY = ("--max-new-tokens", "2")


def test_only_the_owner_may_read_what_is_written(blend, dataset, tmp_path):
    """They quote the documents, the question and the answers; also where a readable file stood before."""
    report, numbers, page = (tmp_path / name for name in ("report.json", "analysis.json", "analysis.html"))
    for path in (report, page):
        path.write_text("old")
        path.chmod(0o666)
    blend.done("report", "--dataset", dataset, "--json", report, *TINY)
    blend.done("analyze", "--dataset", dataset, "--json", numbers, "--html", page)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (report, numbers, page)] == [0o600] * 3


def test_a_link_is_written_through(blend, dataset, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    blend.done("analyze", "--dataset", dataset, "--json", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["records"]


@pytest.mark.parametrize(("command", "option"), [("report", "--json"), ("analyze", "--json"), ("analyze", "--html")])
def test_places_that_cannot_be_written_show_at_once(blend, dataset, tmp_path, command, option):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    os.mkfifo(tmp_path / "fifo.svg")
    for place, told in (
        (tmp_path / "folder.svg", "not a regular file"),
        (tmp_path / "fifo.svg", "not a regular file"),
        (Path("/dev/stdout.svg"), "not a regular file"),
        (tmp_path / "file" / "out.svg", "cannot be written"),
        (tmp_path / f"{'long' * 80}.svg", "File name too long"),
    ):
        result = blend.here(command, "--dataset", dataset, option, place)
        assert told in result.refused(2)
        assert result.err.count("\n") == 1
    assert not list(tmp_path.glob(".*"))


def test_standard_output_that_is_a_file_keeps_it(blend, dataset):
    """/dev/stdout leads to that file: a file moved into its place would lose what the command prints."""
    for call in (("report", "--json", "/dev/stdout"), ("analyze", "--json", "/dev/fd/1"), ("analyze", "--html", "-")):
        told = blend(*call, "--dataset", dataset).refused(2)
        assert "regular file" in told or "goes to a file" in told
    assert not (blend.folder / "-").exists()
