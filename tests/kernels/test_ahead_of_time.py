"""Variants compiled for GPUs that need not be here, in a process where Triton compiles instead of interpreting.

`.ci/run` compiles all of them with the same script; here is one of each kind.
"""

import json
import os
import subprocess
import sys
from itertools import combinations, product

import pytest
from places import REPOSITORY, run_python

from aot.pairs import covering

# What a model runs most, in parts that several processes compile at once.
PARTS = {
    "many rows": "attend bf16 128$",
    "heads of 64": "attend bf16 64$",
    "window": "attend bf16 128, window$",
    "wide heads": "attend (bf16 256|bf16 192/128, 1 row, split 16|fp32 128)$",
    "few rows": "(attend|merge) bf16 128, (1 row|32 lines|256 lines), split (4|16)$",
    "mass": "mass bf16 128(, peaks)?$",
    "elementwise": "norm bf16 (128|4096)$|gate bf16$",
    "placing": "^place (bf16|int8|int4) to bf16 128",
}
CASES = [
    *((part, 90) for part in PARTS),
    *((part, 80) for part in ("many rows", "wide heads", "mass", "placing")),
    ("few rows", 100),
]


def compiled(capability, only, tmp_path):
    table = tmp_path / "table.json"
    script, options = (
        REPOSITORY / "scripts" / "aot_report",
        ("--capability", str(capability), "--only", only, "--jobs", "1"),
    )
    command = [sys.executable, script, *options, "--json", table]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(table.read_text())["rows"]


@pytest.mark.parametrize(("part", "capability"), CASES)
def test_essential_variants_compile_without_spills(part, capability, tmp_path):
    rows = [row for row in compiled(capability, PARTS[part], tmp_path) if not row["by_pairs"]]
    assert rows
    assert all(row["registers"] > 0 for row in rows)
    assert capability == 100 or all(row["spills"] == 0 for row in rows)  # the report allows a few bytes there
    if part == "placing":
        assert len(rows) == 7
        assert all(row["registers"] <= 160 for row in rows)


VERDICT_ON = [
    {"variant": name, "capability": 80, "spills": spills, "shared": shared, "by_pairs": "group" in name}
    for name, spills, shared in (
        ("attend bf16 64", 0, 0), ("attend bf16 128", 8, 0), ("mass bf16 64", 0, 164 * 1024),
        ("attend fp32 256, group 1", 88, 0), ("attend fp32 256", 0, 164 * 1024), ("place fp32 256", 8, 0),
        ("attend bf16 64, group 1", 32, 0), ("attend bf16 64, sinks, group 1", 40, 0),
    )
]  # fmt: skip
# In a process where the script may say that kernels are compiled.
VERDICT = f"""
import json
from tests.scripts.commands import module
print(json.dumps(module("aot_report").faults({VERDICT_ON!r})))
"""


def test_the_verdict_counts_spills_and_shared_memory():
    bad, unavoidable = json.loads(run_python(VERDICT).stdout)
    assert [VERDICT_ON.index(row) for row in bad] == [1, 2, 4, 5, 7]
    assert unavoidable == 1


# The tiles that calls take and that no variant compiles.
UNCOMPILED = """
import os
import sys
os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, {scripts!r})
from itertools import product
import torch
from aot.variants import variants
from blend_kernels.tiles import Shape, best_tile
compiled = {{variant.tile for variant in variants({capability})}}
widths = [(dim, dim) for dim in (32, 64, 80, 96, 112, 128, 192, 256)] + [(192, 128)]
flags = (False, True)
shapes = product((torch.bfloat16, torch.float32), widths, (1, 16, 17, 32, 33, 64, 65, 512, 513), flags, flags)
tiles = {{best_tile({capability} // 10, Shape(dtype, *dims, *rest)) for dtype, dims, *rest in shapes}}
print(len(tiles), tiles - compiled or "")
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_every_tile_that_a_call_takes_is_compiled(capability):
    run = run_python(UNCOMPILED.format(capability=capability, scripts=str(REPOSITORY / "scripts")))
    assert run.returncode == 0, run.stderr
    count, *uncompiled = run.stdout.split(maxsplit=1)
    assert int(count) > 10
    assert uncompiled == []


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 4), (9, 3, 2, 2, 4), (5,) * 6])
def test_pairs_of_options_all_meet_in_few_combinations(sizes):
    options = {f"option {i}": [f"{i}:{j}" for j in range(size)] for i, size in enumerate(sizes)}
    found = covering(options)
    assert found == covering(options)
    met = {pair for each in found for pair in combinations([each[name] for name in options], 2)}
    assert met == {pair for a, b in combinations(options, 2) for pair in product(options[a], options[b])}
    largest, second = sorted(sizes)[-1:-3:-1]
    assert largest * second <= len(found) <= 2 * largest * second
