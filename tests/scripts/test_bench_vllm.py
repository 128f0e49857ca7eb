"""What `scripts/bench_vllm` prints of rows; tests/vllm runs it where vLLM is."""

import pytest
from commands import main, module, output

bench = module("bench_vllm")
PLAIN, BLENDED = bench.PLAIN, bench.BLENDED


def first(server, question, ttft, tpot, **more):
    key = {"server": server, "context": 2048, "question": question}
    return {**key, "prompt_tokens": 2000, "ttft_s": ttft, "tpot_s": tpot, "error": None, **more}


def test_ratios_are_medians_of_pairs_and_lost_ones_count_for_neither():
    rows = [first(PLAIN, 0, 20.0, 0.1), first(PLAIN, 1, 30.0, 0.1), first(PLAIN, 2, 90.0, 0.1)]
    rows += [first(BLENDED, 0, 10.0, 0.1), first(BLENDED, 1, 5.0, 0.2), first(BLENDED, 2, 1.0, 0.1, error="lost")]
    *_, line = bench.first_table(rows)
    times, paces = "25.00 s | 7.50 s | 4.00 | 2.00 to 6.00", "100.00 ms | 150.00 ms | 0.75 | 0.50 to 1.00"
    assert line == f"| 2,000 | 2 | {times} | {paces} |"


def test_answers_together():
    rows = [
        {"server": name, "turn": 0, "batch": 2, "tokens_per_s": rate, "first_tokens_s": [1.0, 2.5], "alone_s": 0.8}
        for name, rate in ((PLAIN, 10.0), (BLENDED, 9.6))
    ]
    rates, firsts, alone = bench.together_line(rows)
    assert alone.endswith("after 0.80 s; the first of them takes 1.25 times as long")
    assert rates.endswith("10.0 tokens/s, with kvblend 9.6")
    assert firsts.endswith("after 1.00 s, half of them within 2.50 s")
    assert list(bench.together_line([{**row, "tokens_per_s": None} for row in rows])) == []


def test_the_load_generators_rows_are_shown():
    times = {"ttft_s": {"p50": 1.0, "p95": 2.0, "p99": 3.0}, "tpot_s": {"p50": 0.1, "p95": 0.2}}
    counts = {"completed": 7, "requests": 8, "requests_per_s": 0.1}
    rows = [{"server": name, "rate": rate, **times, **counts} for name in (PLAIN, BLENDED) for rate in (0.1, 0.2)]
    lines = list(bench.generator_table(rows))
    assert len(lines) == 3 + len(rows)
    assert lines[-1].endswith("7/8 |")


def test_without_vllm_it_says_what_it_needs_and_shows_what_there_is(tmp_path):
    with pytest.raises(SystemExit, match=r"name the python of an environment with vLLM: --vllm .venv-vllm/bin/python"):
        main("bench_vllm", "--json", tmp_path / "r.json")
    output("bench_vllm", "--json", tmp_path / "r.json", "--show")
