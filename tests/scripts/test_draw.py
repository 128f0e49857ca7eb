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
