"""`blend precompute`: incremental, exact about what it did, robust against what it is given."""

import json
from pathlib import Path

from blend_process import entries

from blend.store import open_store

CHUNKS = ("--chunk-tokens", "64")


def test_a_second_run_computes_nothing(filled, documents):
    before = [*entries(filled.store), *entries(filled.store, "contextual")]
    stamps = [path.stat().st_ino for path in before]
    found = filled("precompute", documents, *CHUNKS, "--json").json
    assert (found["computed"], found["added"], found["removed"]) == (0, 0, 0)
    assert found["reused"] == len(before) > found["chunks"]
    assert [path.stat().st_ino for path in before] == stamps


def test_an_edit_costs_only_its_chunks(filled, documents):
    path = documents / "market.md"
    before = set(entries(filled.store))
    path.write_text(path.read_text().replace("bell of 105 kilograms", "bell of 999 kilograms"))
    found = filled("precompute", documents, *CHUNKS, "--json").json
    assert 1 <= found["added"] <= 2
    assert found["computed"] == 2 * found["added"] == 2 * found["removed"]
    after = set(entries(filled.store))
    assert len(after - before) == len(before - after) == found["added"]


def test_removed_documents_go_from_index_and_store(filled, documents):
    before = len(entries(filled.store))
    (documents / "market.md").unlink()
    found = filled("precompute", documents, *CHUNKS, "--json").json
    assert found["removed"] > 0
    assert found["documents"] == 7
    assert len(entries(filled.store)) == before - found["removed"] == found["chunks"]
    chunks = filled("answer", "the market", "--json", "--top-k", "99", "--max-new-tokens", "1").json["chunks"]
    assert not any("market" in chunk["title"] for chunk in chunks)


def test_add_keeps_what_is_there(filled, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("The windmill of town 9 opened in 1999. It grinds rye.\n")
    found = filled("precompute", more, *CHUNKS, "--add", "--json").json
    assert (found["documents"], found["computed"], found["removed"]) == (9, 2, 0)
    assert len(entries(filled.store)) == found["chunks"]


def test_words_for_people(blend, documents):
    one = documents / "quarry.md"
    result = blend("precompute", one, *CHUNKS)
    assert result.code == 0
    assert result.out.startswith("1 document, ")
    assert "tokens/s" in result.out
    assert result.out.count("\n") == 1
    assert "Computing caches: " in result.err  # not a terminal: plain lines
    assert "\r" not in result.err + result.out
    assert "\x1b" not in result.err + result.out


def test_what_cannot_be_read_is_named_and_costs_nothing_else(blend, documents):
    (documents / "binary.md").write_bytes(bytes(range(256)))
    (documents / "empty[red] :bell:.md").write_bytes(b"")
    (documents / "map.png").write_bytes(b"PNG")
    (documents / "lines.jsonl").write_bytes(b"{\n" * 3000)
    result = blend("precompute", documents, *CHUNKS, "--json")
    assert result.code == 0
    assert result.json["documents"] == 8
    assert {Path(one["source"].split(" line ")[0]).name: one["lost"] for one in result.json["skipped"]} == {
        documents.name: 1,
        "binary.md": 1,
        "empty[red] :bell:.md": 1,
        "lines.jsonl": 3000,
    }
    assert result.err.count("skipped ") == 4
    assert "documents: kinds that are not read: 1 .png" in result.err
    assert "lines.jsonl line 1, line 2, line 3 and 2,997 more: is not JSON" in result.err
    assert "binary.md: is a binary file" in result.err
    assert "empty[red] :bell:.md: is empty" in result.err


def test_what_cannot_be_read_any_more_stays_as_it_was(filled, documents):
    before = filled("store", "--json").json
    (documents / "market.md").write_bytes(bytes(range(256)))
    (documents / "glacier.md").unlink()
    for more in ((), ("--shard", "1/1")):
        result = filled("precompute", documents, *CHUNKS, *more, "--json")
        assert result.code == 0
        assert (result.json["documents"], result.json["unread"]) == (7, 1)
        assert "1 document of the index that could not be read: kept as before" in result.err
        held = {json.loads(line)["document"] for line in filled("store", "ls", "--json").out.splitlines()}
        assert "market.md" in held
        assert "glacier.md" not in held
    (documents / "market.md").unlink()
    assert filled("precompute", documents, *CHUNKS, "--json").json["documents"] == 6
    assert filled("store", "--json").json["entries"] < before["entries"]


def test_a_budget_evicts_says_so_and_answers_still_come(blend, documents):
    unlimited = blend.at(blend.folder / "unlimited")
    size = unlimited("precompute", documents, *CHUNKS, "--json").json["store"]["bytes"]
    budget = ("--store-budget", f"{size / 2 / 1e9:.9f}")
    result = blend("precompute", documents, *CHUNKS, *budget, "--json")
    found = result.json
    assert found["evicted"] > 0
    assert found["store"]["bytes"] <= size / 2
    assert "--store-budget" in result.err
    answer = blend(
        "answer", "the market", *budget, "--json", "--top-k", "40", "--min-score", "0", "--max-new-tokens", "2"
    ).json
    hits = [chunk["hit"] for chunk in answer["chunks"]]
    assert any(hits)
    assert not all(hits)
    assert sum(path.stat().st_size for path in entries(blend.store)) <= size / 2


def test_two_at_once_on_one_store(blend, documents):
    running = [blend.start("precompute", documents, *CHUNKS, "--json") for _ in range(2)]
    results = [one.wait() for one in running]
    assert [result.code for result in results] == [0, 0], results
    assert results[0].json["chunks"] == results[1].json["chunks"] == len(entries(blend.store))
    again = blend("precompute", documents, *CHUNKS, "--json").json
    assert again["computed"] == again["added"] == 0


def test_a_store_that_is_something_else(blend, documents):
    blend.store.write_text("a file")
    assert "choose another one with --store" in blend("precompute", documents).refused(7)
    assert blend.store.read_text() == "a file"
    foreign = blend.folder / "foreign"
    (foreign / "kv").mkdir(parents=True)
    (foreign / "kv" / "thesis.tex").write_text("precious")
    assert "choose an empty or new directory" in blend.at(foreign)("precompute", documents).refused(7)
    assert [path.name for path in (foreign / "kv").iterdir()] == ["thesis.tex"]


def test_store_lists_and_clears(filled):
    count, contextual = len(entries(filled.store)), len(entries(filled.store, "contextual"))
    assert 0 < contextual < count
    listed = filled("store", "--json").json
    assert listed["entries"] == count + contextual
    assert sorted(words["caches"] for words in listed["namespaces"]) == [contextual, count]
    kinds = [name.partition("-")[0] for name in listed["artifacts"]]
    assert kinds == ["correction", "correction", "probe", "surrogate"]
    shown = filled("store").out
    assert f"{count + contextual} chunk caches" in shown
    assert f"{count} isolated caches\n" in shown
    assert f"{contextual} contextual caches\n" in shown
    assert "float32, prefix of" in shown
    assert filled("store", "clear", "--yes").code == 0
    assert entries(filled.store) == []
    first = filled("answer", "the market", "--json", "--max-new-tokens", "1").json
    assert not any(chunk["hit"] for chunk in first["chunks"])
    assert len(entries(filled.store)) == len(first["chunks"])
    assert 0 < len(entries(filled.store, "contextual")) <= len(first["chunks"])


def test_a_corpus_without_a_surrogate(filled, documents):
    size, contextual = filled("store", "--json").json["bytes"], len(entries(filled.store, "contextual"))
    found = filled("precompute", documents, *CHUNKS, "--surrogate-tokens", "0", "--json").json
    assert found["computed"] == 0
    assert found["store"]["bytes"] < 0.6 * size
    assert entries(filled.store, "contextual") == []
    again = filled("precompute", documents, *CHUNKS, "--json").json
    assert again["computed"] == contextual
    assert again["store"]["bytes"] == size


def test_a_surrogate_context_out_of_a_file(filled, documents, tmp_path):
    contextual, text = len(entries(filled.store, "contextual")), tmp_path / "neutral.txt"
    text.write_text("The weather is described here in general words. " * 20)
    call = ("precompute", documents, *CHUNKS, "--surrogate-text", text, "--surrogate-tokens", "40", "--json")
    found = filled(*call).json
    assert contextual <= found["computed"] <= found["chunks"]
    store = open_store(filled.store / "kv")
    (name,) = (name for name in store.artifacts() if name.startswith("surrogate-"))
    assert sum(map(len, json.loads(store.read_artifact(name))["chunks"])) == 40
    assert filled(*call).json["computed"] == 0
    assert filled("precompute", documents, *CHUNKS, "--json").json["computed"] == 0
    assert filled("answer", "the market", "--json", "--max-new-tokens", "1").json["problems"] == []


def test_a_surrogate_context_that_cannot_be_read(filled, documents, tmp_path):
    (tmp_path / "empty").write_text("  \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for name, words in (
        ("empty", "is empty"),
        ("latin", "not UTF-8"),
        ("none", "cannot be read"),
        (".", "cannot be read"),
    ):
        assert words in filled("precompute", documents, "--surrogate-text", tmp_path / name).refused(2)


def test_a_quick_run_has_one_cache_a_chunk_and_the_next_one_the_rest(blend, documents):
    quick = blend("precompute", documents, *CHUNKS, "--quick", "--json").json
    assert (quick["computed"], quick["evicted"]) == (quick["chunks"], 0)
    assert entries(blend.store, "contextual") == []
    assert [name.partition("-")[0] for name in blend("store", "--json").json["artifacts"]] == ["probe"]
    answer = blend("answer", "the market", "--json", "--max-new-tokens", "1").json
    assert all(chunk["hit"] for chunk in answer["chunks"])
    rest = blend("precompute", documents, *CHUNKS, "--json").json
    assert 0 < rest["computed"] == len(entries(blend.store, "contextual"))
    assert len(blend("store", "--json").json["artifacts"]) == 4
    again = blend("precompute", documents, *CHUNKS, "--quick", "--json").json
    assert again["computed"] == 0
    assert len(entries(blend.store, "contextual")) == rest["computed"]
