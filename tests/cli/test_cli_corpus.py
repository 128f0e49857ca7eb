"""Several corpora in one store: each with an index, a surrogate context and KV corrections of its own."""

import json
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from blend_process import Blend, entries
from transformers import AutoTokenizer

from blend.config import CorpusConfig
from blend.corpora import index_dir
from blend.errors import ConfigError
from blend.store import open_store
from tests import towns

SHARED = "market"
MINE, THEIRS = ("harbour", "orchard", "glacier", SHARED), ("foundry", "lighthouse", "quarry", SHARED)


def write_owners(base: Path) -> dict[str, Path]:
    """The documents of two owners in folders of their own; one document is both's."""
    folders = {"mine": base / "mine", "theirs": base / "theirs"}
    for folder, topics in zip(folders.values(), (MINE, THEIRS), strict=True):
        folder.mkdir(parents=True)
        for topic in topics:
            (folder / f"{topic}.md").write_text(towns.documents()[f"{topic}.md"])
    return folders


@pytest.fixture(scope="session")
def _both(apart: Callable[[], Blend]) -> Path:
    blend = apart()
    for name, documents in write_owners(blend.folder).items():
        precompute(blend, documents, name)
    return blend.store


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return write_owners(tmp_path / "owners")


@pytest.fixture
def both(blend: Blend, _both: Path, tmp_path: Path) -> Blend:
    """The command line with a store that holds the corpora "mine" and "theirs"."""
    shutil.copytree(_both, tmp_path / "store")
    return blend


def precompute(blend: Blend, folder: Path, name: str, *options: str | Path) -> dict:
    return blend.precompute(folder, "--corpus", name, *options).json


def answer(blend: Blend, name: str) -> dict:
    """To a question that retrieves all chunks, which must have caches."""
    found = blend.answer("--corpus", name, "--top-k", "40", "--min-score", "0").json
    assert all(chunk["hit"] for chunk in found["chunks"])
    return found


def topics_of(found: dict) -> set[str]:
    return {chunk["title"].partition(" > ")[0].split()[-1].lower() for chunk in found["chunks"]}


def surrogates(blend: Blend) -> dict[str, str]:
    """The text of each corpus's surrogate context."""
    store, tokenizer = open_store(blend.store / "kv"), AutoTokenizer.from_pretrained(blend.model)
    names = [name for name in store.artifacts() if name.startswith("surrogate-")]
    read = {name: json.loads(store.read_artifact(name) or b"")["chunks"] for name in names}
    return {name.split("-", 2)[2]: "\n".join(map(tokenizer.decode, chunks)) for name, chunks in read.items()}


def test_two_corpora_know_nothing_of_each_other(both):
    texts = surrogates(both)
    assert set(texts) == {"mine", "theirs"}
    for name, own, others in (("mine", MINE, THEIRS), ("theirs", THEIRS, MINE)):
        assert any(topic in texts[name] for topic in own)
        assert not any(topic in texts[name] for topic in others if topic != SHARED)
        found = answer(both, name)
        assert topics_of(found) == set(own)
        assert found["problems"] == []
    listed = both.listed()
    kinds = Counter(name.partition("-")[0] + name[name.rindex("-") :] for name in listed["artifacts"])
    for name in ("mine", "theirs"):
        assert (kinds[f"surrogate-{name}"], kinds[f"correction-{name}"]) == (1, 2)
    assert listed["corpora"] == ["mine", "theirs"]
    shown = both.here("store").out
    assert "corpora: mine, theirs" in shown
    assert "; KV correction (mine, theirs); surrogate context (mine, theirs)\n" in shown
    assert stat.S_IMODE((both.store / "corpora").stat().st_mode) == 0o700
    # Isolated caches have read nothing but the prefix and their own chunk: the shared document has them once.
    distinct = {chunk["id"] for name in ("mine", "theirs") for chunk in answer(both, name)["chunks"]}
    assert len(entries(both.store)) == len(distinct)


def test_a_corpus_that_is_made_anew_takes_nothing_from_the_others(both, folders):
    before = len(entries(both.store))
    (folders["mine"] / f"{SHARED}.md").unlink()
    (folders["mine"] / "orchard.md").unlink()
    assert precompute(both, folders["mine"], "mine")["removed"] > 0
    theirs = answer(both, "theirs")
    assert topics_of(theirs) == set(THEIRS)
    assert topics_of(answer(both, "mine")) == {"harbour", "glacier"}
    gone = before - len(entries(both.store))
    assert 0 < gone < before - len(theirs["chunks"])
    # The last corpus that holds a document takes its caches along.
    (folders["theirs"] / f"{SHARED}.md").unlink()
    precompute(both, folders["theirs"], "theirs")
    chunks = [*answer(both, "mine")["chunks"], *answer(both, "theirs")["chunks"]]
    assert len(entries(both.store)) == len(chunks)


@pytest.mark.parametrize("way", ["without", "another text"])
def test_a_surrogate_context_that_two_corpora_share(blend, folders, way):
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


def test_unknown_corpora(both, tmp_path):
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
        assert "no corpus 'nobodys'; there are: mine, theirs" in both.here(*command, "--corpus", "nobodys").refused(2)
    assert not (both.store / "corpora" / "nobodys").exists()
    assert "no corpus without a name; there are: mine, theirs" in both.here("answer", "How many gates?").refused(2)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc", ".", "..", "Mine", "-x", "a b", "a.b", "é", "a" * 65, "x\n"])
def test_names_that_no_corpus_can_have(tmp_path, name):
    for refused in (lambda: CorpusConfig(name=name), lambda: index_dir(tmp_path, name)):
        with pytest.raises(ConfigError, match="cannot name a corpus: use up to 64 lower-case letters"):
            refused()
