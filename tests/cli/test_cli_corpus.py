"""Several corpora in one store: each with an index, a surrogate context and KV corrections of its own."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from blend_process import Blend, entries, one_line
from transformers import AutoTokenizer

from blend.config import CorpusConfig
from blend.corpora import index_dir
from blend.errors import ConfigError
from blend.store import open_store

SHARED = "market"
MINE, THEIRS = ("harbour", "orchard", "glacier", SHARED), ("foundry", "lighthouse", "quarry", SHARED)


@pytest.fixture
def folders(documents: Path, tmp_path: Path) -> dict[str, Path]:
    """The documents of two owners; one document is both's."""
    found = {}
    for name, topics in (("mine", MINE), ("theirs", THEIRS)):
        found[name] = tmp_path / name
        found[name].mkdir()
        for topic in topics:
            (found[name] / f"{topic}.md").write_text((documents / f"{topic}.md").read_text())
    return found


def precompute(blend: Blend, folder: Path, name: str, *options: str | Path) -> dict:
    done = blend("precompute", folder, "--corpus", name, "--chunk-tokens", "64", "--json", *options)
    assert done.code == 0, done.err
    return done.json


def answer(blend: Blend, name: str, question: str = "How many gates has the market?") -> dict:
    done = blend("answer", question, "--corpus", name, "--max-new-tokens", "2", "--top-k", "40", "--json")
    assert done.code == 0, done.err
    return done.json


def topics_of(found: dict) -> set[str]:
    return {chunk["title"].partition(" > ")[0].split()[-1].lower() for chunk in found["chunks"]}


def surrogates(blend: Blend) -> dict[str, str]:
    """The text of each corpus's surrogate context."""
    store, tokenizer = open_store(blend.store / "kv"), AutoTokenizer.from_pretrained(blend.model)
    names = [name for name in store.artifacts() if name.startswith("surrogate-")]
    read = {name: json.loads(store.read_artifact(name) or b"")["chunks"] for name in names}
    return {
        name.split("-", 2)[2]: "\n".join(tokenizer.decode(chunk) for chunk in chunks) for name, chunks in read.items()
    }


def test_two_corpora_know_nothing_of_each_other(blend: Blend, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        precompute(blend, folder, name)
    texts = surrogates(blend)
    assert set(texts) == {"mine", "theirs"}
    for name, own, others in (("mine", MINE, THEIRS), ("theirs", THEIRS, MINE)):
        assert any(topic in texts[name] for topic in own)
        assert not any(topic in texts[name] for topic in others if topic != SHARED)
        found = answer(blend, name)
        assert topics_of(found) == set(own)
        assert all(chunk["hit"] for chunk in found["chunks"])
        assert found["problems"] == []
    artifacts = list(open_store(blend.store / "kv").artifacts())
    kinds = sorted(name.partition("-")[0] + name[name.rindex("-") :] for name in artifacts)
    assert kinds == sorted(f"{kind}-{name}" for kind in ("surrogate", "correction", "correction") for name in folders)
    assert len(set(artifacts)) == 6
    listed = blend("store", "--json").json
    assert listed["corpora"] == ["mine", "theirs"]
    assert "corpora: mine, theirs" in blend("store").out
    assert stat.S_IMODE((blend.store / "corpora").stat().st_mode) == 0o700
    # Isolated caches have read nothing but the prefix and their own chunk: the shared document has them once.
    distinct = {chunk["id"] for name in folders for chunk in answer(blend, name)["chunks"]}
    assert len(entries(blend.store)) == len(distinct)


def test_a_corpus_that_is_made_anew_takes_nothing_from_the_others(blend: Blend, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        precompute(blend, folder, name)
    before = len(entries(blend.store))
    (folders["mine"] / f"{SHARED}.md").unlink()
    (folders["mine"] / "orchard.md").unlink()
    assert precompute(blend, folders["mine"], "mine")["removed"] > 0
    theirs = answer(blend, "theirs")
    assert topics_of(theirs) == set(THEIRS)
    assert all(chunk["hit"] for chunk in theirs["chunks"])
    mine = answer(blend, "mine")
    assert topics_of(mine) == {"harbour", "glacier"}
    assert all(chunk["hit"] for chunk in mine["chunks"])
    gone = before - len(entries(blend.store))
    assert 0 < gone < before - len(theirs["chunks"])
    # The last corpus that holds a document takes its caches along.
    (folders["theirs"] / f"{SHARED}.md").unlink()
    precompute(blend, folders["theirs"], "theirs")
    chunks = [*answer(blend, "mine")["chunks"], *answer(blend, "theirs")["chunks"]]
    assert len(entries(blend.store)) == len(chunks)


@pytest.mark.parametrize("way", ["without", "another text"])
def test_a_surrogate_context_that_two_corpora_share(blend: Blend, folders: dict[str, Path], way: str) -> None:
    """Behind the same text, contextual caches of the same chunk are the same: one corpus must not remove the other's."""
    text, other = blend.folder / "public.txt", blend.folder / "other.txt"
    text.write_text("Everybody may read this paragraph, which says nothing of any town, its gates or its bells. " * 3)
    other.write_text("A different paragraph that everybody may read, of nothing in particular at all. " * 3)
    for name, folder in folders.items():
        for topic in {*MINE[1:], *THEIRS[1:]} - {SHARED}:
            (folder / f"{topic}.md").unlink(missing_ok=True)
        precompute(blend, folder, name, "--surrogate-text", text)
    theirs = len(answer(blend, "theirs")["chunks"])
    assert theirs < len(entries(blend.store, "contextual"))
    options = ["--surrogate-tokens", "0"] if way == "without" else ["--surrogate-text", other]
    precompute(blend, folders["mine"], "mine", *options)
    again = precompute(blend, folders["theirs"], "theirs", "--surrogate-text", text)
    assert again["computed"] == 0
    if way == "without":
        assert len(entries(blend.store, "contextual")) == theirs


def test_the_corpus_without_a_name_is_where_it_was(filled: Blend, folders: dict[str, Path]) -> None:
    before = set(open_store(filled.store / "kv").artifacts())
    assert precompute(filled, folders["mine"], "mine")["computed"] > 0
    assert before < set(open_store(filled.store / "kv").artifacts())
    assert (filled.store / "index" / "manifest.json").is_file()
    found = filled("answer", "How many gates?", "--top-k", "40", "--max-new-tokens", "2", "--json").json
    assert topics_of(found) > set(MINE)
    assert all(chunk["hit"] for chunk in found["chunks"])
    result = filled("answer", "How many gates?", "--corpus", "nobodys")
    assert result.code == 2
    assert "no corpus 'nobodys'; there are: the one without a name, mine" in one_line(result.err)


def test_unknown_corpora(blend: Blend, folders: dict[str, Path], tmp_path: Path) -> None:
    precompute(blend, folders["mine"], "mine", "--quick")
    records = tmp_path / "records.jsonl"
    chunk = {"id": "1", "title": "", "text": "The market has two gates."}
    records.write_text(json.dumps({"id": "1", "question": "Gates?", "answers": ["two"], "chunks": [chunk]}))
    for command in (
        ("answer", "How many gates?"),
        ("report",),
        ("report", "--dataset", records),
        ("analyze", "How many gates?", "--html", "page.html"),
        ("analyze", "--dataset", records, "--html", "page.html"),
    ):
        result = blend(*command, "--corpus", "theirs")
        assert result.code == 2, (command, result.err)
        assert "no corpus 'theirs'; there are: mine" in one_line(result.err)
    assert not (blend.store / "corpora" / "theirs").exists()
    result = blend("answer", "How many gates?")
    assert result.code == 2
    assert "no corpus without a name; there are: mine" in one_line(result.err)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc", ".", "..", "Mine", "-x", "a b", "a.b", "é", "a" * 65, "x\n"])
def test_names_that_no_corpus_can_have(tmp_path: Path, name: str) -> None:
    for refused in (lambda: CorpusConfig(name=name), lambda: index_dir(tmp_path, name)):
        with pytest.raises(ConfigError, match="cannot name a corpus: use up to 64 lower-case letters"):
            refused()


@pytest.mark.parametrize("command", ["precompute", "answer"])
def test_a_name_with_a_path_in_it(blend: Blend, documents: Path, command: str) -> None:
    result = blend(command, documents, "--corpus", "../x")
    assert result.code == 2
    assert "cannot name a corpus" in one_line(result.err)
    assert not blend.store.exists()


def test_the_name_out_of_the_environment(blend: Blend, folders: dict[str, Path]) -> None:
    result = blend("precompute", folders["mine"], "--quick", env={"KVBLEND_CORPUS": "mine"})
    assert result.code == 0, result.err
    assert (blend.store / "corpora" / "mine" / "index" / "manifest.json").is_file()
    assert not (blend.store / "index").exists()
