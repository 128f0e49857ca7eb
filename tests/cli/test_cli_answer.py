"""`blend answer` as a user calls it."""

import gc

import pytest
from blend_process import ANSWER, SHORT_CONTEXT, entries

from blend.text import visible
from tests.store.reading import damage_caches

QUESTION = "When did the glacier open?"


def test_answer_streams_and_shows_where_the_time_went(filled):
    result = filled.done("answer", QUESTION, "--max-new-tokens", "6")
    answer, _, panel = result.out.partition("\n╭")
    assert answer.strip()
    for words in ("first token after", "load", "reposition", "rows recomputed", "The glacier", "hit"):
        assert words in panel
    assert "miss" not in panel
    assert "\x1b" not in result.out + result.err
    assert "cut after 6 tokens; --max-new-tokens" in result.err


def test_garbage_is_collected_once_the_libraries_are_loaded(filled):
    assert gc.isenabled()
    assert filled.here(*ANSWER).code == 0
    assert gc.isenabled()


def test_json_is_one_object_alone_on_stdout(filled):
    result = filled.answer("--top-k", "3", "--compare", "--selector", "hkvd:of=k,lead=auto")
    found = result.json
    assert result.out.count("\n") == 1
    assert (found["dtype"], found["weights"]) == ("float32", "native")
    assert set(found["stages"]) == {"retrieve", "load", "reposition", "select", "recompute", "first_token"}
    assert [chunk["hit"] for chunk in found["chunks"]] == [True] * 3
    assert (found["selector"], found["cut"], found["tokens"]) == ("hkvd:of=k", True, 4)
    assert 0 < found["rows_recomputed"] < found["rows_total"]
    timed = sum(seconds for stage, seconds in found["stages"].items() if stage != "retrieve")
    assert 0 < timed <= found["ttft_s"] * 1.001
    assert found["full"]["speedup"] == found["full"]["ttft_s"] / found["ttft_s"]


def test_quiet_prints_the_answer_alone_and_reads_the_question_from_stdin(filled):
    loud = filled.answer().json
    result = filled.done("answer", "-", "-q", "--max-new-tokens", "4", stdin=f"{QUESTION}\n")
    assert result.err == ""
    assert result.out.strip() == visible(loud["answer"], keep="\n\t")


def test_another_models_store_answers_says_so_and_hits_from_then_on(filled, other_model):
    filled.model = other_model
    before = len(entries(filled.store))
    first, second = (filled.answer("--top-k", "3") for _ in range(2))
    assert "was made with" in first.err
    assert f"caches of {other_model} in float32 are computed anew where needed" in " ".join(first.err.split())
    assert [chunk["hit"] for chunk in first.json["chunks"]] == [False] * 3
    assert [chunk["hit"] for chunk in second.json["chunks"]] == [True] * 3
    assert "made with" not in second.err
    assert first.json["answer"]
    assert len(entries(filled.store)) == before + 3


def test_a_damaged_cache_is_recomputed_replaced_and_told(filled):
    clean = filled.answer("--ratio", "1").json
    damage_caches(filled.store / "kv")
    hurt, mended = (filled.answer("--ratio", "1") for _ in range(2))
    assert not any(chunk["hit"] for chunk in hurt.json["chunks"])
    assert hurt.err.count("recomputed and replaced: ") == len(hurt.json["problems"]) > len(hurt.json["chunks"])
    assert hurt.json["answer"] == clean["answer"]
    assert all(chunk["hit"] for chunk in mended.json["chunks"])


def test_a_store_that_cannot_be_written_costs_no_answer(filled, other_model):
    filled.model = other_model
    for name in ("objects", "tmp"):
        folder = filled.store / "kv" / name
        if folder.is_dir():
            folder.rename(folder.with_name(f"{name}-away"))
        folder.write_text("in the way")
    result = filled.answer()
    assert "could not be stored" in result.err
    assert result.json["answer"]


def damage_index(store, kind):
    for path in (store / "index").glob(f"{kind}-*"):
        path.write_bytes(path.read_bytes()[:-9])


def test_damaged_vectors_are_named_and_built_anew_from_the_texts(filled, documents):
    before = filled.precompute(documents).json
    damage_index(filled.store, "index")
    assert "blend precompute" in filled(*ANSWER).refused(8)
    added = filled("precompute", documents / "quarry.md", "--add", "--chunk-tokens", "64")
    assert added.code == 0
    assert "is not as it was written" in added.out + added.err
    assert filled.precompute(documents).json["chunks"] == before["chunks"]
    filled.answer()


def test_an_index_with_damaged_texts_is_named_and_built_anew(filled, documents):
    damage_index(filled.store, "chunks")
    assert "blend precompute" in filled(*ANSWER).refused(8)
    assert filled("precompute", documents / "quarry.md", "--add", "--chunk-tokens", "64").code == 8
    again = filled.precompute(documents)
    assert "the index was built anew" in again.err
    assert again.json["computed"] == 0
    filled.answer()


def test_a_prompt_longer_than_the_context(filled, short_model):
    filled.model = short_model
    result = filled("answer", "A bell", "--top-k", "40")
    assert f"reads at most {SHORT_CONTEXT}" in result.refused(3)
    assert "--top-k" in result.err


def test_an_answer_that_meets_the_end_of_the_context(filled, short_model):
    filled.model = short_model
    found = filled.answer("--max-new-tokens", "100000", "--top-k", "3").json
    assert found["tokens"] + found["rows_total"] == SHORT_CONTEXT
    assert found["cut"]


@pytest.mark.parametrize(
    ("kind", "files", "name", "without"),
    [
        ("correction", 2, "the KV correction", "--no-correction"),
        ("surrogate", 1, "the surrogate context", "--no-surrogate"),
    ],
)
def test_a_damaged_artifact_is_told_and_made_again(filled, documents, kind, files, name, without):
    known = {path: path.read_bytes() for path in (filled.store / "kv" / "artifacts").glob(f"{kind}-*")}
    assert len(known) == files
    for path, raw in known.items():
        path.write_bytes(raw[:-40] + bytes(40))
    hurt = filled.answer()
    assert hurt.err.count(f"answered without it; `blend precompute` makes it again: {name} cannot be used") == 1
    assert len(hurt.json["problems"]) == 1
    assert all(chunk["hit"] for chunk in hurt.json["chunks"])
    assert filled.answer(without).json["problems"] == []
    assert filled.precompute(documents).json["computed"] == 0
    assert all(path.read_bytes() == raw for path, raw in known.items())
    assert filled.answer().json["problems"] == []


def test_without_a_passage_that_is_similar_enough_the_model_answers_alone(filled):
    result = filled.answer("--min-score", "0.999")
    assert result.json["chunks"] == []
    assert "no passage is similar enough to the question" in result.err
