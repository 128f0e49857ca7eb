"""Variants compiled for GPUs that need not be here, in a process where Triton compiles instead of interpreting.

`.ci/run` compiles all of them with the same script; here are one of each kind, and what the list of all has to contain.
"""

import json
import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from aot.pairs import covering

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "aot_report"
ESSENTIAL = "|".join(
    (
        "attend bf16 (64|128|256|128 window|128 split, 1 row|192/128 split, 1 row|80, exact, packed.*)$",
        "attend fp32 (80|128)$",
        "combine bf16 128 split, 1",
        "mass bf16 128$",
        "rotate (bf16 to bf16|int8 to bf16) 128",
        "deviation bf16 128, kv",
    )
)


def compiled(capability, only, tmp_path):
    table = tmp_path / "table.json"
    command = [sys.executable, SCRIPT, "--capability", str(capability), "--only", only, "--json", table, "--jobs", "1"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    return run, json.loads(table.read_text())["rows"]


@pytest.mark.parametrize("capability", [80, 90])
def test_essential_variants_compile_without_spills(capability, tmp_path):
    run, rows = compiled(capability, ESSENTIAL, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    kinds = {row["variant"].split()[0] for row in rows}
    assert kinds == {"attend", "combine", "mass", "rotate", "deviation"}
    assert all(row["registers"] > 0 and row["spills"] == 0 for row in rows)
    tiles = [row["tile"] for row in rows if row["variant"] == "attend bf16 128"]
    assert len(tiles) > 1, "every tile that the tuner may choose"


@pytest.mark.parametrize("capability", [80, 90])
def test_rotating_a_part_of_the_dimensions_keeps_few_registers(capability, tmp_path):
    """What is copied beside a few pairs that turn bounds the block too: by pairs alone it took 239 to 254 registers."""
    _, rows = compiled(capability, "^rotate bf16 to bf16 128, quarter$", tmp_path)
    assert [row["registers"] < 64 for row in rows] == [True]


VERDICT_ON = [
    {"variant": name, "capability": 80, "spills": spills, "shared": shared, "by_pairs": "exact" in name}
    for name, spills, shared in (
        ("attend bf16 64", 0, 0), ("attend bf16 128", 8, 0), ("mass bf16 64", 0, 164 * 1024),
        ("attend fp32 256, exact", 88, 0), ("attend fp32 256", 0, 164 * 1024), ("rotate fp32 256", 8, 0),
        ("attend bf16 64, exact", 16, 0), ("attend bf16 64, exact, sinks", 24, 0),
    )
]  # fmt: skip
# The script as a module; for both capabilities its list, and the tiles that the tuner may choose.
QUESTIONS = f"""
import json, torch
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import product
loader = SourceFileLoader("report", {str(SCRIPT)!r})
report = module_from_spec(spec_from_loader("report", loader))
loader.exec_module(report)
from blend_kernels.tiles import Shape, candidates
kinds = list(product((torch.bfloat16, torch.float32), ((64, 64), (128, 128), (192, 128), (256, 256)), (1, 4096), (False, True)))
answers = {{"verdict": report.faults({VERDICT_ON!r})}}
for capability in (80, 90):
    listed = [(x.name, report.describe(x.tile) if x.tile else "") for x in report.listed(capability, False)]
    tiles = [
        (str(dtype)[6:], *widths, lines, windowed, report.describe(tile))
        for dtype, widths, lines, windowed in kinds
        for tile in candidates(capability // 10, Shape(dtype, *widths, lines, windowed, True))
    ]
    answers[str(capability)] = {{"list": listed, "tiles": tiles}}
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers():
    run = subprocess.run([sys.executable, "-c", QUESTIONS], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize("capability", [80, 90])
def test_every_option_of_every_op_is_in_the_list(answers, capability):
    found = [tuple(each) for each in answers[str(capability)]["list"]]
    names = [name for name, _ in found]
    assert len(set(found)) == len(found)

    def some(op, *words, without=()):
        texts = [f"{name}," for name in names if name.startswith(op)]
        return any(all(word in text for word in words) and not any(word in text for word in without) for text in texts)

    for kind, width in product(
        ("bf16", "fp16", "fp32"), ("32", "64", "80", "96", "112", "128", "192", "256", "192/128")
    ):
        assert some("attend", f"{kind} {width},"), (kind, width)
        assert "/" in width or some("mass", f"{kind} {width},"), (kind, width)
    for option, excluded in (
        (("out and lse,",), ()), (("soft-cap,",), ("window",)), (("sinks,",), ("window",)), (("window", "packed"), ()),
        (("packed 1,",), ()), (("32 lines",), ()), (("64 lines",), ()), (("192/128 split, 1 row",), ()), (("split 64",), ()),
        (("bottom-right", "packed"), ()), (("bottom-right", "window"), ()), (("lse,", "packed"), ("out",)),
    ):  # fmt: skip
        assert some("attend", *option, without=excluded), option
    assert all(
        some("mass", f"{word},") for word in ("per head", "bottom-right", "window", "soft-cap", "group 7", "peaks")
    )
    words = ("one delta", "quarter", "tail", "scale per dim", "scale per head", "fp32 frequencies")
    assert all(some("rotate", f"{word},") for word in words)
    assert some("rotate", "to fp32 128")
    assert some("rotate int8", "pairs")
    assert some("rotate e4m3") == some("rotate e5m2") == (capability == 90)
    assert all(some("deviation", f" {part},", f"{norm},") for part, norm in product(("k", "v", "kv"), ("l1", "l2sq")))
    assert all(some(f"deviation {kinds} ") for kinds in ("bf16", "fp16", "fp32", "fp32 - bf16"))


@pytest.mark.parametrize("capability", [80, 90])
def test_every_tile_of_the_tuner_is_in_the_list(answers, capability):
    """Of every table and kind of work, at the widths that the tables are made for."""
    found = {tuple(each) for each in answers[str(capability)]["list"]}
    short = {"bfloat16": "bf16", "float32": "fp32"}
    for dtype, dim, value_dim, lines, windowed, tile in answers[str(capability)]["tiles"]:
        if (dtype == "float32" and (lines == 1 or windowed)) or (lines == 1 and windowed):
            continue  # fp32 has one list, few rows have one
        width = f"{dim}" if dim == value_dim else f"{dim}/{value_dim}"
        rest = " window" if windowed else " split, 1 row" if lines == 1 else ""
        assert (f"attend {short[dtype]} {width}{rest}", tile) in found


def test_the_verdict_counts_spills_and_shared_memory(answers):
    bad, known = answers["verdict"]
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
