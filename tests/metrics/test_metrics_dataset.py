import json
import re

import pytest

from blend.errors import ConfigError, DatasetError
from blend.eval.dataset import LINE, Record, RecordChunk, load_dataset


def record(**changes):
    fields = {
        "id": "q1",
        "question": "Who?",
        "answers": ["Ada", "Lovelace"],
        "chunks": [{"title": "T", "text": "one"}, {"text": "two"}, {"title": None, "text": "three"}],
        "gold_chunks": [2],
    }
    return {key: value for key, value in {**fields, **changes}.items() if value is not ...}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "questions.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts), encoding="utf-8")
        return path

    return write


def test_a_whole_record(write):
    path = write(record(task="multi", all_values=["1", "2"], other={"ignored": True}))
    chunks = (RecordChunk("T", "one"), RecordChunk("", "two"), RecordChunk("", "three"))
    assert load_dataset(path) == [Record("q1", "Who?", ("Ada", "Lovelace"), chunks, (2,), "multi", ("1", "2"))]


def test_what_may_be_left_out(write):
    path = write(record(id=7, answers=..., gold_chunks=..., chunks=[]))
    assert load_dataset(path) == [Record("7", "Who?", (), (), (), "qa", ())]


def test_blank_lines_byte_order_mark_and_line_separators_inside_text(write):
    text = "line\u2028separator \u0085 and é"
    path = write("\ufeff" + json.dumps(record(question=text), ensure_ascii=False), "", "  ", record(id="q2"), "")
    assert [(r.id, r.question) for r in load_dataset(path)] == [("q1", text), ("q2", "Who?")]


def test_limit_reads_no_further(write):
    path = write(record(), record(id="q2"), "{broken")
    assert [r.id for r in load_dataset(path, limit=2)] == ["q1", "q2"]
    assert len(load_dataset(str(path), limit=1)) == 1
    with pytest.raises(DatasetError, match=r"questions\.jsonl:3: not JSON"):
        load_dataset(path, limit=3)


def test_byte_order_marks(tmp_path):
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "q.jsonl").write_text(LINE + "\n" + LINE.replace("q1", "q2"), encoding=encoding)
        assert [r.id for r in load_dataset(tmp_path / "q.jsonl")] == ["q1", "q2"]


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_must_be_positive(write, limit):
    with pytest.raises(ConfigError, match="limit"):
        load_dataset(write(record()), limit=limit)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "expected a JSON object, not a list"),
        ("null", "expected a JSON object, not null"),
        (record(id=...), '"id" is missing'),
        (record(id=True), '"id" must be a string, not a boolean'),
        (record(id=" "), '"id" is empty'),
        (record(question=...), '"question" is missing'),
        (record(question=3), '"question" must be a string, not a number'),
        (record(question=""), '"question" is empty'),
        (record(answers="Ada"), '"answers" must be a list, not a string'),
        (record(answers=[1]), '"answers"[0] must be a string, not a number'),
        (record(chunks=...), f'"chunks" is missing; a line looks like {LINE}'),
        (record(chunks=None), '"chunks" must be a list, not null'),
        (record(chunks=["text"]), '"chunks"[0] must be an object'),
        (record(chunks=[{"text": "a"}, {"title": "b"}]), '"chunks"[1].text must be a string, not null'),
        (record(chunks=[{"text": "\n"}]), '"chunks"[0] has no text'),
        (record(gold_chunks=[3]), '"gold_chunks" must hold indices of its 3 chunks'),
        (record(gold_chunks=[-1]), "not -1"),
        (record(gold_chunks=[True]), "not True"),
        (record(all_values=[None]), '"all_values"[0] must be a string, not null'),
        (record(task=1), '"task" must be a string'),
        (record(question="\ud83d"), "surrogate"),
        (record(), "id 'q1' was used before"),
    ],
)
def test_a_malformed_line_is_named_with_its_place(write, line, problem):
    path = write(record(), "", line)
    with pytest.raises(DatasetError, match=re.escape(problem)) as caught:
        load_dataset(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_the_line_that_messages_show_is_a_record(write):
    (found,) = load_dataset(write(LINE))
    assert (found.id, found.chunks) == ("q1", (RecordChunk("...", "..."),))


def test_files_that_hold_no_records(write, tmp_path):
    for lines in ((), ("", " ")):
        with pytest.raises(DatasetError, match="holds no records"):
            load_dataset(write(*lines))
    with pytest.raises(DatasetError, match="cannot be read"):
        load_dataset(tmp_path / "absent.jsonl")
    with pytest.raises(DatasetError, match="cannot be read"):
        load_dataset(tmp_path)
    (tmp_path / "binary").write_bytes(json.dumps(record()).encode() + b"\n\xff\xfe\x00")
    with pytest.raises(DatasetError, match="binary: not UTF-8 text; expected JSON Lines"):
        load_dataset(tmp_path / "binary")
