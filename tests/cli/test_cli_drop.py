"""`blend drop`: a corpus goes with everything that is its own, and nothing of another."""

from blend_process import ANSWER

from blend.store import open_store

TWIN = ("--corpus", "twin")


def test_a_corpus_goes_with_what_is_its_own(filled, documents):
    before = filled.listed()
    filled.precompute(documents, *TWIN)
    (documents / "own.md").write_text("# The weir\n\nThe weir of Osk is opened by hand at dawn. " * 6)
    filled.precompute(documents / "own.md", "--add", *TWIN)
    grown = filled.listed()
    assert grown["entries"] > before["entries"]
    assert "--yes" in filled.here("drop", *TWIN).refused(2)
    done = filled("drop", *TWIN, "--yes", "--json").json
    assert (done["corpus"], done["caches"]) == ("twin", grown["entries"] - before["entries"])
    assert filled.listed() == before
    assert not (filled.store / "corpora" / "twin").exists()
    assert all(chunk["hit"] for chunk in filled.answer().json["chunks"]), "the other corpus has its caches still"
    refused = filled.here("drop", *TWIN, "--yes").refused(2)
    assert "no corpus 'twin'; there are: the one without a name" in refused


def test_the_corpus_without_a_name(filled, documents, monkeypatch):
    """What belongs to no corpus stays for the others, and goes with the last."""
    filled.precompute(documents / "market.md", *TWIN)
    open_store(filled.store / "kv").write_artifact(f"quality-{'0' * 32}", b"{}")
    before = set(filled.listed()["artifacts"])
    notes = filled.store / "kv" / "sources"
    assert len(list(notes.iterdir())) == 2
    monkeypatch.setattr("blend.rag.load_embedder", None)  # no embedder is needed
    assert filled.here("drop", "--yes").code == 0
    left = set(filled.listed()["artifacts"])
    assert left == {name for name in before if name.endswith("-twin") or name.startswith("probe-")}
    assert any(name.startswith("probe-") for name in left)
    assert [path.name.partition(".")[0] for path in notes.iterdir()] == ["twin"]
    assert filled.here("drop", "--yes", *TWIN).code == 0
    held = filled.listed()
    assert (held["entries"], held["corpora"], held["artifacts"]) == (0, [], [])
    assert list(notes.iterdir()) == []
    assert "no corpus" in filled.here("drop", "--yes").refused(2)


def test_a_shared_corpus_is_gone_for_all(blend, documents, tmp_path):
    here, there = (blend.shared(f"file://{tmp_path / 'mounted'}", tmp_path / name) for name in ("here", "there"))
    here.precompute(documents, *TWIN)
    there.answer(*TWIN)
    here.done("drop", *TWIN, "--yes")
    for machine in (here, there):
        assert "no index" in machine(*ANSWER, *TWIN).refused(8)
