"""Placing from outside: how many calls of torch a layer takes, and whether AMD's GPUs are compiled for."""

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blend_kernels import ChunkShape, LayerShape, PlacingTable, Turn, place_layer
from tests.kernels.test_placing import BF16, frequencies, make_chunk

NAMED = "^place (bf16|int8|int4) to bf16 128"
COMPILED = {**os.environ, "TRITON_INTERPRET": "0"}


class Calls(TorchDispatchMode):
    """Counts torch's calls within it, without those that make views."""

    VIEWS = ("slice", "view", "transpose", "alias", "split", "as_strided")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        if name not in self.VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def many_places(chunks, device):
    """All chunks, side by side."""
    rows = np.fromiter((chunk.tokens for chunk in chunks), np.int64)
    starts, zeros = np.cumsum(rows) - rows, np.zeros_like(rows)
    return PlacingTable(chunks, zeros, starts, rows, starts, zeros > 0, torch.device(device))


def tiny_chunks(count, packing="plain"):
    shape = ChunkShape((LayerShape(1, 8, 1, 8),) * 2, BF16, packing)
    return [make_chunk(shape, 3)[0] for _ in range(count)]


@pytest.mark.parametrize(
    ("packing", "with_gain", "most"),
    [("plain", False, 8), ("plain", True, 13), ("int8", False, 21), ("int4", False, 31)],
)
def test_few_calls_of_torch_a_layer_for_any_number_of_chunks(packing, with_gain, most):
    names = []
    for count in (8, 64):
        table, turn = many_places(tiny_chunks(count, packing), "cpu"), Turn(frequencies(4, "cpu"))
        caches = [torch.empty(1, 3 * count, 8, dtype=BF16) for _ in range(2)]
        gain = torch.zeros(3 * count, 16) if with_gain else None
        place_layer(table, 0, *caches, turn, None, gain=gain)
        with Calls() as calls:
            place_layer(table, 1, *caches, turn, None, gain=gain)
        names.append(calls.names)
    assert names[0] == names[1]
    assert len(names[0]) <= most


FOR_AMD = f"""
import sys
sys.path[:0] = {sys.path!r}
import re
import triton
from triton.backends.compiler import GPUTarget
from aot.variants import variants

class Compiled(Exception):
    pass

def for_amd(source, target, options, compile=triton.compile):
    binary = compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
    raise Compiled(len(binary.asm["hsaco"]))

triton.compile = for_amd
for variant in variants(90):
    if re.search({NAMED!r}, variant.name) and re.search("128$|gain", variant.name) and not variant.by_pairs:
        try:
            variant.compile(90)
        except Compiled as binary:
            print(binary)
"""


def test_the_kernel_compiles_for_gfx942():
    if find_spec("triton.backends.amd") is None:
        pytest.skip("this Triton does not compile for AMD")
    run = subprocess.run([sys.executable, "-c", FOR_AMD], capture_output=True, text=True, env=COMPILED)
    assert run.returncode == 0, run.stderr
    sizes = [int(line) for line in run.stdout.split()]
    assert len(sizes) == 4
    assert min(sizes) > 0
