"""Text, paths and questions in bytes that are not UTF-8, standard streams that are closed, and input that never ends."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from blend_process import one_line, record
from places import PYTHONPATH

from blend.cli.questions import read_questions
from blend.errors import DatasetError

ODD = os.fsdecode(b"caf\xe9 \xff")


def test_a_question_on_standard_input_that_is_not_utf8(filled):
    refused = filled("answer", "-", stdin=ODD).refused(2)
    assert "the question on standard input cannot be read ('utf-8' codec" in refused


def test_a_question_with_nuls_is_answered(filled):
    question = "When\0did\0it open?"
    assert filled.done("answer", "-", "--json", "--max-new-tokens", "2", stdin=question).json["question"] == question


class Endless(io.StringIO):
    """Writes as much as is asked for, as a device does."""

    def read(self, size: int | None = -1) -> str:
        assert size is not None
        assert size >= 0, "this would take all memory"
        return "x" * size


def test_a_question_that_never_ends(filled, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Endless())
    assert "more than 1,000,000 characters" in filled.here("answer", "-").refused(2)


def test_questions_that_never_end(tmp_path):
    with pytest.raises(DatasetError, match="/dev/zero has more than 64 MB; name a text file, or divide it"):
        read_questions(Path("/dev/zero"))


def test_utf8_in_a_locale_that_is_not():
    """The question is taken, and the option's value is told as it was typed."""
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "blend", "answer", "Wie groß?", "--selector", "größer"]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **plain}
    result = subprocess.run(command, capture_output=True, env=env, check=False)
    assert (result.returncode, result.stdout) == (2, b"")
    assert "unknown selector 'größer'" in one_line(result.stderr.decode("utf-8"))


def test_a_store_and_a_dataset_whose_paths_are_not_utf8(blend, documents, tmp_path):
    """Any bytes may name a file; they are shown as what they are."""
    odd = blend.at(tmp_path / ODD / "store")
    (documents / "market.md").rename(documents / f"{ODD}.md")
    assert r"caf\udce9 \udcff/store" in odd.done("precompute", documents).out
    odd.answer()
    assert r"caf\udce9 \udcff/store" in odd("store").out
    dataset, out, page = (tmp_path / f"{ODD}.{suffix}" for suffix in ("jsonl", "json", "html"))
    dataset.write_text(json.dumps(record(0)))
    odd.done("report", "--dataset", dataset, "--json", out, "--max-new-tokens=2")
    assert json.loads(out.read_bytes())["workload"] == dataset.name
    odd.done("analyze", "--dataset", dataset, "--html", page)
    assert rb"caf\udce9 \udcff.jsonl" in page.read_bytes()
    dataset.write_bytes(b'{"id": "\xff"}')
    assert "not UTF-8 text" in odd("report", "--dataset", dataset).refused(6)


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        ("env >&-", 0, ""),
        ("frob 2>&-", 2, ""),
        ("answer - <&-", 2, "there is no standard input"),
        ("answer - 0>/dev/null", 2, "standard input cannot be read"),
    ],
)
def test_streams_that_are_closed(call, code, told):
    command = ["/bin/sh", "-c", f"exec {sys.executable} -m blend {call}"]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (result.returncode, result.stdout) == (code, "")
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_questions_in_any_encoding_without_its_mark(tmp_path, capsys, encoding):
    question = "Was kostet das größere Boot?"
    (tmp_path / "q").write_bytes(f"{question}\r\n\r\n".encode(encoding))
    assert read_questions(tmp_path / "q") == [question]
    assert ("is read as windows-1252" in capsys.readouterr().err) == (encoding == "latin-1")
