"""`scripts/draw`: pictures of saved results, and what it says where there is nothing to draw."""

import json

import pytest
from commands import command, main

from blend.errors import DatasetError

pytest.importorskip("matplotlib")

COSTS = {"full": 1.0, "reuse": 0.02, "published": 0.19, "published, gradual": 0.2, "hkvd 5 %": 0.1, "hkvd 15 %": 0.19}


@pytest.fixture
def results(tmp_path):
    """Results of two sets of three records; the last record of the second lacks a method."""
    rows = []
    for number in range(6):
        for method, cost in COSTS.items():
            about = {"model": "tiny", "set": f"set {number // 3}", "id": str(number), "method": method}
            rows.append(
                {**about, "kl": (1 - cost) / (number + 1), "share": cost, "ttft_s": 3 * cost, "full_ttft_s": 3.0}
            )
    rows.pop()
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"rows": rows}))
    return file


def _drawn(*arguments):
    assert main("draw", *arguments) == 0
    return arguments[-1].read_text(encoding="utf-8")


def test_a_picture_names_selectors_and_ratios_on_the_records_that_all_have(results, tmp_path):
    drawn = _drawn("selection", results, "--out", tmp_path / "all.svg")
    for words in ("plain reuse", "hkvd, published form", "gradual, published form", "5 %", "15 %"):
        assert f">{words}</text>" in drawn
    assert "tiny: 5 records, mean over 2 sets" in drawn
    of_two = _drawn("selection", results, "--methods", "reuse", "published", "--out", tmp_path / "two.svg")
    assert "tiny: 6 records" in of_two
    assert ">hkvd</text>" not in of_two


def test_the_same_results_give_the_same_picture(results, tmp_path):
    first, second = (_drawn("selection", results, "--out", tmp_path / name) for name in ("1.svg", "2.svg"))
    assert first == second
    assert main("draw", "selection", results, "--out", tmp_path / "p.png") == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_load_generator_is_drawn_by_server_and_rate(tmp_path):
    file = tmp_path / "vllm.json"
    times = {"median_ttft_ms": 900.0, "p95_ttft_ms": 1500.0, "median_tpot_ms": 30.0}
    rows = [{"server": server, "rate": rate, **times} for server in ("vllm", "vllm + kvblend") for rate in (0.5, 0.25)]
    file.write_text(json.dumps({"generator": rows, "options": {"model": "tiny", "dtype": "float32"}}))
    drawn = _drawn("generator", file, "--out", tmp_path / "g.svg")
    for words in ("vllm, p95", "vllm + kvblend, median", "0.25", "0.50", "vllm bench serve, tiny, float32"):
        assert f">{words}</text>" in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["selection", "{}/results.json", "--out", "{}/p.pdf"], "a picture ends in .png or .svg"),
        (["selection", "{}/none.json", "--out", "{}/p.png"], "there is no such file"),
        (
            ["selection", "{}/results.json", "--out", "{}/p.png", "--methods", "oracle"],
            "no record has full, oracle and all",
        ),
    ],
)
def test_what_cannot_be_drawn_ends_in_one_line(results, arguments, message):
    ended = command("draw", *(argument.format(results.parent) for argument in arguments))
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert message in ended.stderr


def test_results_without_the_rows_are_refused(tmp_path):
    from _results import Results
    from study.pictures import draw_generator, draw_selection

    for draw in (draw_selection, draw_generator):
        with pytest.raises(DatasetError):
            draw(Results(tmp_path / "empty.json"))


@pytest.fixture
def prompt(tmp_path):
    """An analyzed prompt of two chunks; the question reads one row far more than all others."""
    nothing = [None] * 2
    scores = {"before": [0.0] * 4 + [0.5, 0.4, 0.2, 0.1], "after": [0.0] * 4 + [0.1] * 4, "asked": [0.01] * 7 + [0.4]}
    segments = [
        ("prefix", "", 0, 2),
        ("chunk 1", "Harbour", 2, 6),
        ("chunk 2", "Port Rowan > Bells of the town hall", 6, 10),
    ]
    document = {
        "segments": [
            {"name": name, "title": title, "start": start, "stop": stop}
            for name, title, start, stop in [*segments, ("question", "", 10, 12)]
        ],
        "recomputed": [6, 9, 10, 11],
        "scores": [{"name": name, "values": [*nothing, *values, *nothing]} for name, values in scores.items()],
    }
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps({"prompts": [document]}))
    return file


def test_an_analyzed_prompt_is_drawn_with_the_titles_of_its_chunks(prompt, tmp_path):
    deviation = _drawn("deviation", prompt, "--out", tmp_path / "d.svg")
    attention = _drawn("attention", prompt, "--out", tmp_path / "a.svg")
    for drawn in (deviation, attention):
        assert ">Harbour</text>" in drawn
        assert ">\u2026Bells of the town hall</text>" in drawn
    assert ">kept as stored: 2 rows, 4%</text>" in attention
    assert ">recomputed: 2 rows, 87%</text>" in attention
    assert ">40 \u2191</text>" in attention, "the row that is cut off is written out"


def _report(tmp_path, name, methods, **about):
    document = {
        "workload": "q.txt",
        "record_count": 3,
        "methods": {key: {"kl": kl} for key, kl in methods.items()},
        **about,
    }
    file = tmp_path / name
    file.write_text(json.dumps(document))
    return file


def test_kl_is_drawn_by_selector_and_reports_of_other_questions_are_refused(tmp_path):
    bare = _report(tmp_path, "bare.json", {"reuse": 0.4, "random 5%": 0.3, "random 40%": 0.2, "query_guided 5%": 0.1})
    default = _report(tmp_path, "default.json", {"reuse": 0.4, "5%": 0.02, "40%": 0.01})
    drawn = _drawn("kl", bare, default, "--out", tmp_path / "kl.svg")
    for words in ("random rows", "rows that the question reads most", "plain reuse: no row recomputed"):
        assert f">{words}</text>" in drawn
    for other in (
        _report(tmp_path, "o.json", {"5%": 0.1}, record_count=4),
        _report(tmp_path, "n.json", {"blend": 0.1}),
    ):
        with pytest.raises(DatasetError):
            main("draw", "kl", bare, other, "--out", tmp_path / "kl.svg")
