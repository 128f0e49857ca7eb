"""`blend drop`: a corpus goes with everything that is its own, and nothing of another."""

from blend.store import open_store

CHUNKS = ("--chunk-tokens", "64")
ANSWER = ("answer", "When did the glacier open?", "--json", "--max-new-tokens", "4")


def test_a_corpus_goes_with_what_is_its_own(filled, documents):
    before = filled("store", "--json").json
    assert filled("precompute", documents, *CHUNKS, "--corpus", "twin").code == 0
    (documents / "own.md").write_text("# The weir\n\nThe weir of Osk is opened by hand at dawn. " * 6)
    assert filled("precompute", documents / "own.md", *CHUNKS, "--add", "--corpus", "twin").code == 0
    grown = filled("store", "--json").json
    assert grown["entries"] > before["entries"]
    assert "--yes" in filled("drop", "--corpus", "twin").refused(2)
    done = filled("drop", "--corpus", "twin", "--yes", "--json").json
    assert done["corpus"] == "twin"
    assert done["caches"] == grown["entries"] - before["entries"]
    assert filled("store", "--json").json == before
    assert not (filled.store / "corpora" / "twin").exists()
    assert all(chunk["hit"] for chunk in filled(*ANSWER).json["chunks"]), "the other corpus has its caches still"
    assert "no corpus 'twin'" in filled("drop", "--corpus", "twin", "--yes").refused(2)


def test_the_corpus_without_a_name(filled, documents, monkeypatch):
    """What belongs to no corpus stays for the others, and goes with the last."""
    assert filled("precompute", documents / "market.md", *CHUNKS, "--corpus", "twin").code == 0
    open_store(filled.store / "kv").write_artifact(f"quality-{'0' * 32}", b"{}")
    before = set(filled("store", "--json").json["artifacts"])
    notes = filled.store / "kv" / "sources"
    assert len(list(notes.iterdir())) == 2
    monkeypatch.setattr("blend.rag.load_embedder", None)  # no embedder is needed
    assert filled.here("drop", "--yes").code == 0
    left = set(filled("store", "--json").json["artifacts"])
    assert left == {name for name in before if name.endswith("-twin") or name.startswith("probe-")}
    assert any(name.startswith("probe-") for name in left)
    assert [path.name.partition(".")[0] for path in notes.iterdir()] == ["twin"]
    assert filled("drop", "--yes", "--corpus", "twin").code == 0
    held = filled("store", "--json").json
    assert (held["entries"], held["corpora"], held["artifacts"]) == (0, [], [])
    assert list(notes.iterdir()) == []
    assert "no corpus" in filled("drop", "--yes").refused(2)


def test_a_shared_corpus_is_gone_for_all(blend, documents, tmp_path):
    blend.store = None
    places = [
        {"KVBLEND_STORE": f"file://{tmp_path / 'mounted'}", "KVBLEND_STORE_CACHE": str(tmp_path / name)}
        for name in ("here", "there")
    ]
    assert blend("precompute", documents, *CHUNKS, "--corpus", "twin", env=places[0]).code == 0
    assert blend(*ANSWER, "--corpus", "twin", env=places[1]).code == 0
    assert blend("drop", "--corpus", "twin", "--yes", env=places[0]).code == 0
    for place in places:
        assert "no index" in blend(*ANSWER, "--corpus", "twin", env=place).refused(8)
