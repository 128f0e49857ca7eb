"""The questions of a text file, in any encoding."""

import pytest

from blend.cli.questions import read_questions
from blend.errors import DatasetError


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_mark_is_no_part_of_the_first_question(tmp_path, encoding):
    question = "Was kostet das größere Boot?"
    (tmp_path / "q").write_bytes(f"{question}\r\n\r\n".encode(encoding))
    assert read_questions(tmp_path / "q") == [question]


def test_a_detected_encoding_is_noted(tmp_path, capsys):
    (tmp_path / "q").write_bytes("Was kostet das größere Boot?".encode("latin-1"))
    assert read_questions(tmp_path / "q") == ["Was kostet das größere Boot?"]
    assert "is read as windows-1252" in capsys.readouterr().err


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "q").write_bytes(bytes(range(256)))
    with pytest.raises(DatasetError, match="binary"):
        read_questions(tmp_path / "q")
