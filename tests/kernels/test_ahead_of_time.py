"""Variants compiled for GPUs that need not be here, in a process where Triton compiles instead of interpreting.

`.ci/run` compiles all of them with the same script; here are one of each kind, and what the list of all has to contain.
"""

import json
import os
import subprocess
import sys
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest

from aot.pairs import covering

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "aot_report"
CAPABILITIES = (80, 90, 100)
# What a model runs most, in parts that several processes compile at once.
PARTS = {
    "many rows": "attend bf16 128$",
    "heads of 64": "attend bf16 64$",
    "window": "attend bf16 128 window$",
    "wide heads": "attend (bf16 256|bf16 192/128 split, 1 row|fp32 128)$",
    "few rows": "(attend|combine) bf16 128 split, (1|8|64) rows?$",
    "mass": "mass bf16 128(, peaks, last row)?$",
    "copies": "rotate bf16 to bf16 128(, pairs|, quarter)?$|deviation bf16 128, kv",
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
    command = [sys.executable, SCRIPT, "--capability", str(capability), "--only", only, "--json", table, "--jobs", "1"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(table.read_text())["rows"]


@pytest.mark.parametrize(("part", "capability"), CASES)
def test_essential_variants_compile_without_spills(part, capability, tmp_path):
    rows = [row for row in compiled(capability, PARTS[part], tmp_path) if not row["by_pairs"]]
    assert rows
    assert all(row["registers"] > 0 for row in rows)
    assert capability == 100 or all(row["spills"] == 0 for row in rows)  # the report allows a few bytes there
    if part == "many rows":
        assert len(rows) > 1, "every tile that the tuner may choose"
    if part == "copies":
        # what is copied next to a few pairs that turn bounds the block too: by pairs alone it took 239 to 254 registers
        assert [row["registers"] < 64 for row in rows if row["variant"].endswith("quarter")] == [True]
    if part == "placing":
        assert len(rows) == 7
        assert all(row["registers"] <= 160 for row in rows)
    for row in rows:
        assert resident(row, capability) >= row["resident"], row


def resident(row, capability):
    """Programs that a multiprocessor holds at once: registers are handed out by 256 for a warp, shared memory by block."""
    registers = 65536 // (-(-row["registers"] * 32 // 256) * 256 * row["warps"])
    shared = {80: 164, 90: 228, 100: 228}[capability] * 1024 // (row["shared"] + 1024)
    return min(registers, shared)


VERDICT_ON = [
    {"variant": name, "capability": 80, "spills": spills, "shared": shared, "by_pairs": "exact" in name}
    for name, spills, shared in (
        ("attend bf16 64", 0, 0), ("attend bf16 128", 8, 0), ("mass bf16 64", 0, 164 * 1024),
        ("attend fp32 256, exact", 88, 0), ("attend fp32 256", 0, 164 * 1024), ("rotate fp32 256", 8, 0),
        ("attend bf16 64, exact", 32, 0), ("attend bf16 64, exact, sinks", 40, 0),
    )
]  # fmt: skip
# The script as a module: its verdict, its list for a capability, and the tiles that the tuner may choose there.
QUESTIONS = f"""
import json, sys, torch
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import product
loader = SourceFileLoader("report", {str(SCRIPT)!r})
report = module_from_spec(spec_from_loader("report", loader))
loader.exec_module(report)
from blend_kernels.tiles import Shape, candidates
capability = int(sys.argv[1])
widths = ((64, 64), (128, 128), (192, 128), (256, 256))
tiles = [
    (str(dtype)[6:], *width, lines, windowed, report.describe(tile))
    for dtype, width, lines, windowed in product((torch.bfloat16, torch.float32), widths, (1, 4096), (False, True))
    for tile in candidates(capability // 10, Shape(dtype, *width, lines, windowed, True))
]
listed = [(x.name, report.describe(x.tile) if x.tile else "") for x in report.listed(capability)]
print(json.dumps({{"verdict": report.faults({VERDICT_ON!r}), "list": listed, "tiles": tiles}}))
"""


@cache
def answers(capability):
    command = [sys.executable, "-c", QUESTIONS, str(capability)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_option_and_every_tile_is_in_the_list(capability):
    listed = {tuple(each) for each in answers(capability)["list"]}
    assert len(listed) == len(answers(capability)["list"])
    if capability < 100:  # there nothing is listed by pairs of options
        assert_every_option({name for name, _ in listed}, capability)
    assert_every_tile(listed, answers(capability)["tiles"])


def assert_every_option(names, capability):
    def some(op, *words, without=()):
        texts = [f"{name}," for name in names if name.startswith(op)]
        return any(all(word in text for word in words) and not any(word in text for word in without) for text in texts)

    for kind, width in product(
        ("bf16", "fp16", "fp32"), ("32", "64", "80", "96", "112", "128", "192", "256", "192/128")
    ):
        assert some("attend", f"{kind} {width},"), (kind, width)
        assert "/" in width or some("mass", f"{kind} {width},"), (kind, width)
    for option, excluded in (
        (("out and lse,",), ()), (("soft-cap,",), ("window",)), (("sinks,",), ("window",)), (("lse,", "window"), ("out",)),
        (("bottom-right", "window"), ()), (("32 lines",), ()), (("64 lines",), ()), (("split 128",), ()),
        (("192/128 split, 1 row",), ()),
    ):  # fmt: skip
        assert some("attend", *option, without=excluded), option
    words = ("last row", "bottom-right", "window", "soft-cap", "group 7", "peaks")
    assert all(some("mass", f"{word},") for word in words)
    words = ("one delta", "quarter", "tail", "fp32 frequencies")
    assert all(some("rotate", f"{word},") for word in words)
    assert some("rotate", "to fp32 128")
    assert all(some("deviation", f" {part},", f"{norm},") for part, norm in product(("k", "v", "kv"), ("l1", "l2sq")))
    assert all(
        some("norm", kind, words) for kind in ("bf16", "fp16", "fp32") for words in ("one rounding,", "plus one,")
    )
    assert all(some("norm", f" {dim},") for dim in (64, 96, 128, 4096, 8192))
    assert all(some("gate", f"{kind},") for kind in ("bf16", "fp16", "fp32"))
    assert all(some(f"deviation {kinds} ") for kinds in ("bf16", "fp16", "fp32", "fp32 - bf16"))


def assert_every_tile(listed, tiles):
    """Of every table and kind of work, at the widths that the tables are made for."""
    short = {"bfloat16": "bf16", "float32": "fp32"}
    for dtype, dim, value_dim, lines, windowed, tile in tiles:
        if (dtype == "float32" and (lines == 1 or windowed)) or (lines == 1 and windowed):
            continue  # fp32 has one list, few rows have one
        width = f"{dim}" if dim == value_dim else f"{dim}/{value_dim}"
        kind = " window" if windowed else " split, 1 row" if lines == 1 else ""
        assert (f"attend {short[dtype]} {width}{kind}", tile) in listed


def test_the_verdict_counts_spills_and_shared_memory():
    bad, known = answers(80)["verdict"]
    assert [VERDICT_ON.index(row) for row in bad] == [1, 2, 4, 5, 7]
    assert known == 1


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 4), (9, 3, 2, 2, 4), (5,) * 6])
def test_pairs_of_options_all_meet_in_few_combinations(sizes):
    options = {f"option {i}": [f"{i}:{j}" for j in range(size)] for i, size in enumerate(sizes)}
    found = covering(options)
    assert found == covering(options)
    met = {pair for each in found for pair in combinations([each[name] for name in options], 2)}
    assert met == {pair for a, b in combinations(options, 2) for pair in product(options[a], options[b])}
    largest, second = sorted(sizes)[-1:-3:-1]
    assert largest * second <= len(found) <= 2 * largest * second
