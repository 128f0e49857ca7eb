import json
import re

import pytest

from blend.errors import DatasetError
from blend.eval.dataset import LINE, Record, RecordChunk, load_dataset


def record(**changes):
    chunks = [{"title": "T", "text": "one"}, {"text": "two"}, {"title": None, "text": "three"}]
    fields = {"id": "q1", "question": "Who?", "answers": ["Ada", "Lovelace"], "chunks": chunks, **changes}
    return {name: value for name, value in fields.items() if value is not ...}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "questions.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts), encoding="utf-8")
        return path

    return write


def test_a_whole_record_and_what_may_be_left_out(write):
    path = write(record(task="multi", other={"ignored": True}), record(id=7, answers=..., chunks=[]))
    chunks = (RecordChunk("T", "one"), RecordChunk("", "two"), RecordChunk("", "three"))
    whole, bare = load_dataset(path)
    assert whole == Record("q1", "Who?", ("Ada", "Lovelace"), chunks, "multi")
    assert bare == Record("7", "Who?", (), (), "qa")
    (shown,) = load_dataset(write(LINE))
    assert (shown.id, shown.chunks) == ("q1", (RecordChunk("...", "..."),))


def test_blank_lines_byte_order_marks_and_line_separators_inside_text(write, tmp_path):
    text = "line\u2028separator \u0085 and é"
    path = write("\ufeff" + json.dumps(record(question=text), ensure_ascii=False), "", "  ", record(id="q2"), "")
    assert [(r.id, r.question) for r in load_dataset(path)] == [("q1", text), ("q2", "Who?")]
    (tmp_path / "q.jsonl").write_text(LINE + "\n" + LINE.replace("q1", "q2"), encoding="utf-16")
    assert [r.id for r in load_dataset(tmp_path / "q.jsonl")] == ["q1", "q2"]


def test_limit_reads_no_further(write):
    path = write(record(), record(id="q2"), "{broken")
    assert [r.id for r in load_dataset(path, limit=2)] == ["q1", "q2"]
    with pytest.raises(DatasetError, match=r"questions\.jsonl:3: not JSON"):
        load_dataset(path, limit=3)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        (record(id=True), '"id" must be text'),
        (record(id=" "), '"id" is empty'),
        (record(question=3), '"question" must be text'),
        (record(answers="Ada"), '"answers" must be a list'),
        (record(chunks=...), '"chunks" must be a list'),
        (record(chunks=["text"]), '"chunks" must hold objects'),
        (record(chunks=[{"text": "a"}, {"title": "b"}]), '"text" must be text'),
        (record(chunks=[{"text": "\n"}]), '"text" is empty'),
        (record(question="\ud83d"), '"question" must be text'),
        (record(), "id 'q1' was used before"),
    ],
)
def test_a_malformed_line_is_named_with_its_place(write, line, problem):
    path = write(record(), "", line)
    with pytest.raises(DatasetError, match=rf"^{re.escape(str(path))}:3: .*{re.escape(problem)}[^\n]*$"):
        load_dataset(path)


def test_files_that_hold_no_records(write, tmp_path):
    with pytest.raises(DatasetError, match="holds no records"):
        load_dataset(write("", " "))
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(DatasetError, match="cannot be read"):
            load_dataset(path)
    (tmp_path / "binary").write_bytes(json.dumps(record()).encode() + b"\n\xff\xfe\x00")
    with pytest.raises(DatasetError, match="binary: not UTF-8 text; expected JSON Lines"):
        load_dataset(tmp_path / "binary")
