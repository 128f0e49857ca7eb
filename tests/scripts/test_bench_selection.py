"""`scripts/bench_selection` over a tiny model and small sets of questions, in this process and once as a command."""

import json
from argparse import Namespace

import pytest
from commands import command, output

from _results import Results, grouped
from blend.errors import ConfigError, DatasetError
from study.measuring import run
from study.tables import show
from tests.tiny_model import save_tiny_model

METHODS = {"full", "reuse", "published", "published, gradual", "query_guided 5 %", "query_guided 15 %"}


def rows(folder):
    return Results(folder / "r.json").rows("rows")


def again(folder, records=3, **changed):
    """Measure what is missing."""
    sets = (folder / "questions.jsonl", folder / "meetings.jsonl")
    places = {"sets": sets, "stores": folder / "stores", "model": str(folder / "tiny")}
    sizes = {
        "records": records,
        "max_new_tokens": 4,
        "selectors": ["query_guided"],
        "ratios": [0.05, 0.15],
        "published": [0.15],
    }
    run(Namespace(**{**places, **sizes, "codecs": ["float32"], **changed}), Results(folder / "r.json"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with the two sets, the model and the results of three records each."""
    folder = tmp_path_factory.mktemp("bench")
    words = [f"w{number}" for number in range(100)]
    save_tiny_model(folder / "tiny", " ".join(words))
    for name, task in (("questions", "qa"), ("meetings", "summarize-query")):
        lines = []
        for number in range(36):
            texts = [" ".join(words[number + part : number + part + 20]) for part in range(4)]
            chunks = [{"title": f"{name} {number}.{part}", "text": text} for part, text in enumerate(texts)]
            about = {"id": str(number), "question": words[number], "answers": ["w1"], "task": task}
            lines.append(json.dumps({**about, "chunks": chunks}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    again(folder)
    return folder


def test_every_method_is_measured_once_on_the_same_records(measured):
    before = rows(measured)
    records = grouped(before, "set", "id")
    assert len(records) == 6
    assert all({row["method"] for row in same} == METHODS for same in records.values())
    assert len(before) == 6 * len(METHODS)
    again(measured)
    assert rows(measured) == before


def test_of_several_codecs_each_has_its_own_methods(measured, tmp_path):
    for name in ("questions.jsonl", "tiny"):
        (tmp_path / name).symlink_to(measured / name)
    again(tmp_path, 1, sets=(tmp_path / "questions.jsonl",), codecs=("float32", "int4"))
    found = {row["method"]: row["kl"] for row in rows(tmp_path)}
    assert set(found) == {"full", *(f"{name}, {codec}" for name in METHODS - {"full"} for codec in ("float32", "int4"))}
    assert found["reuse, float32"] != found["reuse, int4"]
    lines = list(show(Results(tmp_path / "r.json"), ["query_guided 15 %, int4"], "query_guided 15 %, float32"))
    assert any("to query_guided 15 %, float32" in line for line in lines)


def test_the_command_shows_or_says_what_is_missing(measured):
    given = ("show", measured / "r.json", "--paired")
    shown = output("bench_selection", *given, "reuse", "query_guided 5 %")
    assert "| query_guided 5 % |" in shown
    assert "| published |" not in shown
    missing = command("bench_selection", *given, "oracle")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "no record has full, published and all of oracle" in missing.stderr


def test_what_cannot_be_measured_is_refused(measured, tmp_path):
    small = tmp_path / "small.jsonl"
    small.write_text("".join((measured / "questions.jsonl").read_text().splitlines(keepends=True)[:30]))
    with pytest.raises(DatasetError, match="no set has a record to measure"):
        again(measured, sets=(small,))


STUDIED = [
    "gradual",
    "oracle",
    "sums",
    "sums:last=1",
    "blocks:block=4",
    "floors:floor=1",
    "zsum",
    "prefilter:budgets=1.5",
]


def test_selectors_of_the_study_are_measured_next_to_built_in_ones(measured, tmp_path):
    """Each spends the same budget; `prefilter` runs fewer rows below its check layer than `mixed`."""
    for name in ("questions.jsonl", "tiny"):
        (tmp_path / name).symlink_to(measured / name)
    again(
        tmp_path, 1, sets=(tmp_path / "questions.jsonl",), selectors=[*STUDIED, "mixed", "query_guided"], ratios=[0.3]
    )
    by_method = {row["method"]: row for row in rows(tmp_path)}
    assert all(by_method[f"{spec} 30 %"]["kl"] is not None for spec in STUDIED)
    shares = {spec: by_method[f"{spec} 30 %"]["share"] for spec in (*STUDIED, "mixed", "query_guided")}
    assert len({shares[spec] for spec in ("oracle", "sums", "sums:last=1", "blocks:block=4", "query_guided")}) == 1
    assert shares["query_guided"] < shares["prefilter:budgets=1.5"] < shares["mixed"]
    untimed = {spec for spec in STUDIED if by_method[f"{spec} 30 %"]["ttft_s"] is None}
    assert untimed == {"oracle", "sums", "sums:last=1"}, "they run passes that no user would wait for"
    assert any(line.startswith("| oracle 30 % |") for line in show(Results(tmp_path / "r.json"), [], "published"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [("oracle:depth=3", "depth"), ("sums:last=x", "malformed"), ("blocks:block", "see scripts/study")],
)
def test_a_selector_of_the_study_that_cannot_be_read_is_refused(measured, spec, message):
    with pytest.raises(ConfigError, match=message):
        again(measured, selectors=[spec])
