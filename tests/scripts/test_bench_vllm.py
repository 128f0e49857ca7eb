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
    *_, line = bench.pair_table(rows, "context", "question", "ttft_s", "tpot_s")
    times, paces = "25.000 | 7.500 | 4.00 | 2.00 to 6.00", "0.100 | 0.150 | 0.75 | 0.50 to 1.00"
    assert line == f"| 2048 | 2 | {times} | {paces} |"


def test_without_vllm_it_says_what_it_needs_and_shows_what_there_is(tmp_path):
    with pytest.raises(SystemExit, match=r"name the python of an environment with vLLM: --vllm .venv-vllm/bin/python"):
        main("bench_vllm", "--json", tmp_path / "r.json")
    output("bench_vllm", "--json", tmp_path / "r.json", "--show")
