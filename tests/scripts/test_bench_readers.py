"""`scripts/bench_readers`: its files, how facts are counted, and a run with our readers and a small program as another."""

import json
import sys
from collections import Counter

import pytest
from commands import module, output

from _reader_facts import BLANK, TICKED, Fact, Group, is_stated, plain
from _reader_files import reader_files
from blend_retrieval.loading import load_bytes

# Kinds of facts that our readers lose in some of the files; every other one is stated.
LOST = {"links"}

OTHER = """
class MarkItDown:
    def convert(self, path):
        text = open(path, encoding="utf-8").read()
        if path.endswith(".csv"):
            raise ValueError("no tables here")
        return type("Result", (), {"text_content": text.replace("4", "5")})
"""

ROWS = Group(("Oban", "Wick"), ("12", "34"), (("Cranes", "Pilots"),))
CELL = Fact("table", "row", "Wick", ("34",), ROWS, ("Pilots",))
YEARS = Group(("Oban", "Wick"), ("12", "34", "56", "78"), (("Year 1", "Year 2"), ("Spring", "Autumn")))
LATER = Fact("table", "row", "Wick", ("78",), YEARS, ("Year 2", "Autumn"))
EARLY = Fact("table", "row", "Wick", ("34",), YEARS, ("Year 1", "Autumn"))
DEPTH = Fact("fields", "after", "Wick depth", ("34",), Group(("Oban depth", "Wick depth"), ("12", "34")))
RENT = Fact("edits", "after", "Wick rent", ("34",), Group(("Wick rent",), ("34",)), wrong=("33",))
POWER = Fact("powers", "after", "Wick", ("3·10^6",), Group(("Wick",), ("3·10^6",)))
CODE = Fact("cell", "after", "Wick", ("01234",), Group(("Wick",)))
STEP = Fact("number", "line", "Call the pilot", ("3.", "3)"), Group(()))
NOTE = Fact("notes", "note", "Wick", ("34",), Group(("Oban", "Wick"), ("12", "34")))
TICK = Fact("box", "tick", "Wick ferry", TICKED, Group(()))
NO_TICK = Fact("box", "tick", "Wick ferry", BLANK, Group(()))
FLAG = Fact("choice", "chosen", "Flag", ("Ochre",), Group((), ("Ochre", "Indigo")))
TABLE = "| Harbour | Cranes | Pilots |\n| --- | --- | --- |\n| Oban | 1 | 2 |\n"
YEAR_TABLE = "| Harbour | Year 1 | | Year 2 | |\n| --- |\n| | Spring | Autumn | Spring | Autumn |\n"


@pytest.mark.parametrize(
    ("fact", "right", "wrong"),
    [
        (CELL, TABLE + "| Wick | 12 | 34 |", TABLE + "| Wick | 34 | 12 |"),
        (CELL, TABLE + "| Wick | | 34 |", TABLE + "| Wick | 34 | |"),
        (CELL, TABLE + "| Wick | 12 | 34 |", TABLE + "| Wick | 12 | 134 |"),
        (CELL, "Harbour  Cranes  Pilots\nWick  12  34", "Harbour  Cranes  Pilots\nWick 34 12"),
        (CELL, "Harbour: Wick; Cranes: 12; Pilots: 34", "Harbour: Wick; Cranes: 34; Pilots: 12"),
        (CELL, TABLE + "| Wick | 12 | 34 |", TABLE + "| Oban | 12 | 34 |\n| Wick | 5 | 6 |"),
        (CELL, "| x | Cranes Pilots |\n| Wick | 12 34 |", "| x | Cranes Pilots |\n| Wick | 34 12 |"),
        (LATER, YEAR_TABLE + "| Wick | 12 | 34 | 56 | 78 |", YEAR_TABLE + "| Wick | 12 | 78 | 56 | 34 |"),
        (LATER, "Year 1 Year 2\nSpring Autumn Spring Autumn\nWick 12 34 56 78", "Year 1 Year 2\nWick 12 34 56 78"),
        (
            EARLY,
            "Year 1 Year 2\nSpring Autumn Spring Autumn\nWick 12 34 56 78",
            "Year 1 Year 2\nSpring Autumn Spring Autumn\nWick 34 12 56 78",
        ),
        (DEPTH, "Oban depth: 12\nWick depth: 34", "Wick depth\nOban depth\n34\n12"),
        (DEPTH, "**Wick depth:**\n\n34", "Oban depth\nWick depth\n12\n34"),
        (DEPTH, "Wick depth: 34 m", "Wick depth: 34.5 m"),
        (RENT, "Wick rent: ~~33~~ 34", "Wick rent: 33 34"),
        (RENT, "Wick rent: 34", "Wick rent: 3334"),
        (POWER, "Wick: 3·10<sup>6</sup>", "Wick: 3·106"),
        (POWER, "Wick: 3·10⁶", "Wick: 3·10 6"),
        (CODE, "Wick: 01234", "Wick: 1234"),
        (STEP, "3. Call the pilot", "1. Call the pilot"),
        (STEP, "3)\nCall the pilot", "- Call the pilot"),
        (NOTE, "Oban[^1] and Wick[^2]\n\n[^1]: 12\n\n[^2]: 34", "Oban[^1] and Wick[^2]\n\n[^1]: 34\n\n[^2]: 12"),
        (NOTE, "Oban<sup>1</sup>, Wick<sup>2</sup>\n1. 12\n2. 34", "Oban, Wick\nfirst 12\nsecond 34"),
        (NOTE, "Oban [1] Wick [2]\n\n[1]\n\n12\n\n[2]\n\n34", "Oban [1] Wick [2]\n\n[1]\n\n34\n\n[2]\n\n12"),
        (NOTE, "Wick (comment: 34)", "Oban (comment: 34)"),
        (NOTE, "# Wick\n\n### Notes:\nFrom 34 on", "# Wick\n\n# Oban\n\n### Notes:\nFrom 34 on"),
        (TICK, "- [x] Wick ferry", "- [ ] Wick ferry"),
        (TICK, "☐ Oban ferry ☒ Wick ferry", "☒ Oban ferry ☐ Wick ferry"),
        (NO_TICK, "Wick ferry \\[ \\]", "Wick ferry"),
        (FLAG, "Flag: Ochre", "Flag: Indigo Ochre"),
        (FLAG, "Flag: ☐ Indigo ☒ Ochre", "Flag: ☒ Indigo ☐ Ochre"),
    ],
)
def test_a_fact_counts_in_the_right_relation_alone(fact, right, wrong):
    assert is_stated(fact, plain(right))
    assert not is_stated(fact, plain(wrong))


def test_sixty_files_state_twenty_facts_each_and_are_the_same_at_any_time():
    files, again = reader_files(), reader_files()
    assert len(files) == len({file.name for file in files}) == 60
    assert {len(file.facts) for file in files} == {20}
    assert [file.data for file in files] == [file.data for file in again]
    relations = Counter(fact.relation for file in files for fact in file.facts)
    assert set(relations) == {"after", "line", "row", "note", "tick", "chosen"}


def test_our_readers_state_the_facts():
    lost = []
    for file in reader_files():
        documents = load_bytes(file.name, file.data).documents
        text = plain("\n\n".join(f"{document.title}\n\n{document.text}" for document in documents))
        lost += [(file.name, str(fact)) for fact in file.facts if fact.kind not in LOST and not is_stated(fact, text)]
    assert lost == []


def test_readers_are_compared_on_the_same_files(tmp_path):
    """markitdown is a program that changes fours and reads no tables, docling one that fails; unstructured is not there."""
    library = tmp_path / "library"
    (library / "markitdown-0.1.dist-info").mkdir(parents=True)
    (library / "markitdown-0.1.dist-info" / "METADATA").write_text("Name: markitdown\nVersion: 0.1\n")
    (library / "markitdown.py").write_text(OTHER)
    environment(tmp_path, "markitdown", f'PYTHONPATH="{library}" exec "{sys.executable}" "$@"')
    environment(tmp_path, "docling", "echo no model >&2; exit 1")
    where = ("bench_readers", "--json", tmp_path / "r.json", "--kinds", "md", "csv")
    text = output(*where, "--environments", tmp_path, "--only", "kvblend", "markitdown", "docling")
    rows = {row["reader"]: row for row in json.loads((tmp_path / "r.json").read_text())["readers"]}
    for name in ("kvblend", "markitdown"):
        assert sum(rows[name]["again_s"].values()) > 0
        assert rows[name]["megabytes"] > 10
    assert set(rows["markitdown"]["errors"]) == {f"csv{number}.csv" for number in range(4)}
    lines: dict[str, str] = {}
    for line in text.splitlines():
        lines.setdefault(line.split(" | ")[0].strip("| "), line)
    assert "100.0 % (160 of 160) | 100.0 % (160 of 160) | - |" in lines["kvblend"]
    right, of_all = lines["markitdown 0.1"].split("(")[1].split(")")[0].split(" of ")
    assert of_all == "160"
    assert 20 < int(right) < 60, "of the 80 facts in Markdown, those without a four"
    assert f"({right} of 80) | csv |" in lines["markitdown 0.1"]
    assert lines["csv"] == "| csv | 80 | 80 | 0 |"
    assert lines["docling: does not run: no model"]
    absent = output(
        *where, "--environments", tmp_path / "r.json", "--only", "markitdown", "unstructured", "--lost", "markitdown"
    )
    assert "unstructured: cannot be installed: " in absent
    assert absent.partition("fact that markitdown loses")[2].count("| kvblend |") == 160 - int(right)
    results = json.loads((tmp_path / "r.json").read_text())
    results["readers"][0]["files"] = "of another version"
    (tmp_path / "r.json").write_text(json.dumps(results))
    stale = output(*where, "--show")
    assert "kvblend: has read other files: read again with --only kvblend" in stale
    assert "| kvblend" not in stale
    assert f"| markitdown 0.1 | {int(right) / 1.6:.1f} % ({right} of 160)" in stale


def environment(folder, name, command):
    """An environment as the script leaves it behind, whose python is this command."""
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    steps = module("bench_readers").ENVIRONMENTS[name]
    (folder / name / "installed").write_text("\n".join(map(" ".join, steps)))
