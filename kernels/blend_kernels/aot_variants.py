"""The variants worth compiling ahead of time: every op, the head dimensions and dtypes in use, each with its best-guess tile.

Launches are recorded from the ops' own launchers on memory that is reserved and never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .aot import Launch, Resources, compile_launch, record
from .attention_kernel import attend_tile
from .attention_launch import launch_attention
from .checks import Mode, Packed, Rule
from .combine_kernel import combine_splits
from .deviation_kernel import deviation_rows
from .deviation_launch import launch_deviation
from .mass_kernel import mass_tile
from .mass_launch import mass_from_lse
from .rotation_kernel import rotate_tile
from .rotation_launch import launch_rotation
from .rotation_plain import Layout
from .tiles import Shape, Tile, candidates
from .work import Work

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Variant(NamedTuple):
    """A name for the table, its tile (None for the ops without a choice), and its launch."""

    name: str
    tile: Tile | None
    launch: Launch

    def compile(self, capability: int) -> Resources:
        """Registers, spills and shared memory on this compute capability (80, 90)."""
        return compile_launch(self.launch, capability)


def variants(capability: int, every_tile: bool = False) -> Iterator[Variant]:
    """All variants for a compute capability; attention with its first tile, or with every candidate."""
    for name, work, splits in _attention_calls():
        q = work.q
        shape = Shape(q.dtype, q.shape[3], work.value_dim, q.shape[2] * work.group, work.rule.window is not None, True)
        tiles = candidates(capability // 10, shape)
        for tile in tiles if every_tile else tiles[:1]:
            with record(attend_tile, combine_splits) as notes:
                launch_attention(work, tile, splits, want_lse=False)
            yield Variant(f"attend {name}", tile, notes[0])
        if splits > 1 and len(notes) > 1:
            yield Variant(f"combine {name}", None, notes[1])
    yield from _other_ops()


def _work(
    dim: int,
    dtype: torch.dtype,
    rows: int = 1024,
    value_dim: int | None = None,
    kv_heads: int = 8,
    mode: Mode = "exact",
    window: int | None = None,
    softcap: float | None = None,
) -> Work:
    q = torch.empty(1, rows, 32, dim, dtype=dtype).transpose(1, 2)
    k = torch.empty(1, kv_heads, 4096, dim, dtype=dtype)
    v = torch.empty(1, kv_heads, 4096, value_dim or dim, dtype=dtype)
    return Work(q, k, v, torch.empty(rows, dtype=torch.int64), Rule(mode, window, softcap, dim**-0.5))


def _attention_calls() -> Iterator[tuple[str, Work, int]]:
    for dim in (64, 80, 96, 112, 128, 256):
        yield f"bf16 {dim}", _work(dim, BF16), 1
    yield "fp16 128", _work(128, FP16), 1
    yield "fp32 64", _work(64, FP32), 1
    yield "fp32 128", _work(128, FP32), 1
    yield "bf16 192/128", _work(192, BF16, value_dim=128, kv_heads=32), 1
    yield "bf16 128 bottom-right", _work(128, BF16, mode="bottom-right"), 1
    yield "bf16 128 window", _work(128, BF16, window=4096), 1
    yield "bf16 256 window soft-cap", _work(256, BF16, window=4096, softcap=50.0), 1
    sunk = _work(64, BF16, window=128)._replace(sinks=torch.empty(32, dtype=BF16))
    yield "bf16 64 window sinks", sunk, 1
    packed = Packed(torch.empty(9, dtype=torch.int64), torch.empty(9, dtype=torch.int64))
    yield "bf16 128 packed", _work(128, BF16)._replace(packed=packed), 1
    yield "bf16 128 lse only", _work(128, BF16)._replace(v=None), 1
    yield "bf16 64 split, 1 row", _work(64, BF16, rows=1), 16
    yield "bf16 128 split, 1 row", _work(128, BF16, rows=1), 16
    yield "bf16 128 split, 64 rows", _work(128, BF16, rows=64), 4
    yield "bf16 256 split, 1 row", _work(256, BF16, rows=1), 16


def _other_ops() -> Iterator[Variant]:
    for name, work in (("bf16 128", _work(128, BF16)), ("bf16 64 window", _work(64, BF16, window=128))):
        with record(mass_tile) as notes:
            mass_from_lse(work, work.empty_lse(), per_head=False)
        yield Variant(f"mass {name}", None, notes[0])
    k, freq = torch.empty(1, 8, 4096, 128, dtype=BF16), torch.empty(64, dtype=torch.float64)
    int8, scale = torch.empty(8, 4096, 128, dtype=torch.int8), torch.empty(4096, 1)
    delta = torch.empty(4096, dtype=torch.int64)
    turns = [("bf16 halves", k, False, None, k), ("bf16 pairs", k, True, None, k), ("int8", int8, False, scale, k[0])]
    for name, states, interleaved, scales, out in turns:
        with record(rotate_tile) as notes:
            launch_rotation(states, delta, freq, Layout(64, 0, interleaved), scales, out)
        yield Variant(f"rotate {name}", None, notes[0])
    with record(deviation_rows) as notes:
        launch_deviation((k, k), (k, k), "l2sq")
    yield Variant("deviation bf16 kv", None, notes[0])
