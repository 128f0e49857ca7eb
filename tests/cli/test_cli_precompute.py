"""`blend precompute`: incremental, exact about what it did, robust against what it is given."""

import json
import re
from pathlib import Path

from blend_process import entries

from blend.store import open_store
from tests import towns


def test_a_second_run_computes_nothing(filled, documents):
    before = [*entries(filled.store), *entries(filled.store, "contextual")]
    stamps = [path.stat().st_ino for path in before]
    found = filled.precompute(documents).json
    assert (found["computed"], found["added"], found["removed"]) == (0, 0, 0)
    assert found["reused"] == len(before) > found["chunks"]
    assert [path.stat().st_ino for path in before] == stamps


def test_an_edit_costs_only_its_chunks(filled, documents):
    path = documents / "market.md"
    before = set(entries(filled.store))
    path.write_text(path.read_text().replace("bell of 105 kilograms", "bell of 999 kilograms"))
    found = filled.precompute(documents).json
    assert 1 <= found["added"] <= 2
    assert found["computed"] == 2 * found["added"] == 2 * found["removed"]
    after = set(entries(filled.store))
    assert len(after - before) == len(before - after) == found["added"]


def test_add_keeps_what_is_there(filled, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("The windmill of town 9 opened in 1999. It grinds rye.\n")
    found = filled.precompute(more, "--add").json
    assert (found["documents"], found["computed"], found["removed"]) == (9, 2, 0)
    assert len(entries(filled.store)) == found["chunks"]


def test_words_for_people(blend, documents):
    result = blend.done("precompute", documents / "quarry.md")
    assert result.out.startswith("1 document, ")
    assert "tokens/s" in result.out
    assert result.out.count("\n") == 1
    assert "Computing caches: " in result.err  # not a terminal: plain lines
    assert "\r" not in result.err + result.out
    assert "\x1b" not in result.err + result.out


def test_what_cannot_be_read_is_named_and_costs_nothing_else(blend, documents):
    (documents / "binary[red] :bell:.md").write_bytes(bytes(range(256)))
    (documents / "map.png").write_bytes(b"PNG")
    (documents / "lines.jsonl").write_bytes(b"{\n" * 3000)
    result = blend.precompute(documents)
    assert result.json["documents"] == 8
    lost = {Path(one["source"].split(" line ")[0]).name: one["lost"] for one in result.json["skipped"]}
    assert lost == {documents.name: 1, "binary[red] :bell:.md": 1, "lines.jsonl": 3000}
    assert result.err.count("skipped ") == 3
    assert "documents: kinds that are not read: 1 .png" in result.err
    assert "lines.jsonl line 1, line 2, line 3 and 2,997 more: is not JSON" in result.err
    assert "binary[red] :bell:.md: is a binary file" in result.err


def test_what_cannot_be_read_any_more_stays_as_it_was(filled, documents):
    before = filled.listed()
    (documents / "market.md").write_bytes(bytes(range(256)))
    (documents / "glacier.md").unlink()
    for more in ((), ("--shard", "1/1")):
        result = filled.precompute(documents, *more)
        assert (result.json["documents"], result.json["unread"]) == (7, 1)
        assert "1 document of the index that could not be read: kept as before" in result.err
        held = {json.loads(line)["document"] for line in filled("store", "ls", "--json").out.splitlines()}
        assert "market.md" in held
        assert "glacier.md" not in held
    (documents / "market.md").unlink()
    assert filled.precompute(documents).json["documents"] == 6
    assert filled.listed()["entries"] < before["entries"]


def test_a_budget_evicts_says_so_and_answers_still_come(blend, documents):
    unlimited = blend.at(blend.folder / "unlimited")
    size = unlimited.precompute(documents).json["store"]["bytes"]
    budget = ("--store-budget", f"{size / 2 / 1e9:.9f}")
    result = blend.precompute(documents, *budget)
    assert result.json["evicted"] > 0
    assert result.json["store"]["bytes"] <= size / 2
    assert "--store-budget" in result.err
    answer = blend.answer(*budget, "--top-k", "40", "--min-score", "0").json
    assert {chunk["hit"] for chunk in answer["chunks"]} == {True, False}
    assert sum(path.stat().st_size for path in entries(blend.store)) <= size / 2


def test_two_at_once_on_one_store(blend, documents):
    running = [blend.start("precompute", documents, "--chunk-tokens", "64", "--json") for _ in range(2)]
    results = [one.wait() for one in running]
    assert [result.code for result in results] == [0, 0], results
    assert results[0].json["chunks"] == results[1].json["chunks"] == len(entries(blend.store))
    again = blend.precompute(documents).json
    assert again["computed"] == again["added"] == 0


def test_store_lists_what_is_there(filled):
    count, contextual = len(entries(filled.store)), len(entries(filled.store, "contextual"))
    assert 0 < contextual < count
    listed = filled.listed()
    assert listed["entries"] == count + contextual
    assert sorted(words["caches"] for words in listed["namespaces"]) == [contextual, count]
    kinds = [name.partition("-")[0] for name in listed["artifacts"]]
    assert kinds == ["correction", "correction", "probe", "surrogate"]
    shown = filled.here("store").out
    assert f"{count + contextual} chunk caches" in shown
    isolated = rf"float32, prefix of \d+ tokens: {count} isolated caches; KV correction; surrogate context\n"
    assert re.search(isolated, shown)
    assert f"{contextual} contextual caches; KV correction\n" in shown


def test_a_corpus_without_a_surrogate(filled, documents):
    size, contextual = filled.listed()["bytes"], len(entries(filled.store, "contextual"))
    found = filled.precompute(documents, "--surrogate-tokens", "0").json
    assert found["computed"] == 0
    assert found["store"]["bytes"] < 0.6 * size
    assert entries(filled.store, "contextual") == []
    again = filled.precompute(documents).json
    assert again["computed"] == contextual
    assert again["store"]["bytes"] == size


def test_a_surrogate_context_out_of_a_file(filled, documents, tmp_path):
    contextual, text = len(entries(filled.store, "contextual")), tmp_path / "neutral.txt"
    text.write_text("The weather is described here in general words. " * 20)
    call = (documents, "--surrogate-text", text, "--surrogate-tokens", "40")
    found = filled.precompute(*call).json
    assert contextual <= found["computed"] <= found["chunks"]
    store = open_store(filled.store / "kv")
    (name,) = (name for name in store.artifacts() if name.startswith("surrogate-"))
    assert sum(map(len, json.loads(store.read_artifact(name))["chunks"])) == 40
    assert filled.precompute(*call).json["computed"] == 0
    assert filled.precompute(documents).json["computed"] == 0
    assert filled.answer().json["problems"] == []


def test_a_quick_run_has_one_cache_a_chunk_and_the_next_one_the_rest(blend, documents):
    quick = blend.precompute(documents, "--quick").json
    assert (quick["computed"], quick["evicted"]) == (quick["chunks"], 0)
    assert entries(blend.store, "contextual") == []
    assert [name.partition("-")[0] for name in blend.listed()["artifacts"]] == ["probe"]
    assert all(chunk["hit"] for chunk in blend.answer().json["chunks"])
    rest = blend.precompute(documents).json
    assert 0 < rest["computed"] == len(entries(blend.store, "contextual"))
    assert len(blend.listed()["artifacts"]) == 4
    again = blend.precompute(documents, "--quick").json
    assert again["computed"] == 0
    assert len(entries(blend.store, "contextual")) == rest["computed"]


def test_a_store_with_estimates_states_what_to_expect(filled, tmp_path):
    before = filled.answer("--quality", "0.5").json
    assert before["quality"] is None
    assert any("no quality is promised" in line for line in before["problems"])
    (tmp_path / "few").mkdir()
    for number, topic in enumerate(("glacier", "harbour", "library")):
        (tmp_path / "few" / f"{topic}.md").write_text(towns.document(topic, number), encoding="utf-8")
    made = filled.precompute("few", "--questions", "auto")
    assert "fitted to 18 questions: too few for --quality 0.05" in made.err
    generous = filled.answer("--quality", "50").json
    assert (generous["quality"]["target"], generous["quality"]["ratio"]) == (50, 0.05)
    assert generous["quality"]["kl"] >= 0
    assert not any("promised" in line for line in generous["problems"])
    strict = filled.answer("--quality", "0.05").json
    assert (strict["quality"]["kl"], strict["quality"]["ratio"]) == (0.0, 1.0)
    assert any("estimates from 18 prompts cannot show this quality" in line for line in strict["problems"])
    assert "expected KL" in filled("answer", "When did the glacier open?", "--quality", "50").out


def test_too_few_questions_are_refused(filled, documents, tmp_path):
    (tmp_path / "q.txt").write_text("When did the glacier open?\n", encoding="utf-8")
    refused = filled("precompute", documents, "--chunk-tokens", "64", "--questions", "q.txt")
    assert "q.txt has 1 question, estimates take 16" in refused.refused(2)
    assert "--quick" in filled.here("precompute", documents, "--quick", "--questions", "auto").refused(2)


def test_a_hostile_file_is_skipped_alone(blend, documents):
    """A PDF whose form draws itself, without end: it used to take all memory, and to end the command."""
    form = b"/Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /XObject << /X 5 0 R >> >> >>",
        b"<< /Length 5 >> stream\n/X Do\nendstream",
        b"<< %s /Length 60 >> stream\n%s\nendstream" % (form, b"/X Do " * 10),
    ]
    numbered = (b"%d 0 obj %s endobj\n" % entry for entry in enumerate(objects, 1))
    (documents / "bomb.pdf").write_bytes(b"%PDF-1.7\n" + b"".join(numbered) + b"trailer << /Root 1 0 R >>")
    result = blend.precompute(documents)
    assert result.json["documents"] == 8
    (skipped,) = result.json["skipped"]
    assert Path(skipped["source"]).name == "bomb.pdf"
    assert skipped["reason"].startswith("draws more than 200,000 texts")
