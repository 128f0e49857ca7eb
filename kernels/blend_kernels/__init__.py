"""Attention of scattered rows over a blended KV cache, with the copies and scores that blending needs.

    selective_attention   softmax attention of rows at given positions over all keys, without a mask in memory
    decode_attention      softmax attention of one row over all keys, on a CPU
    Positions             positions of rows, for these two
    attend_rows           softmax attention over caches whose addresses stand in device memory, for CUDA graphs
    mass_rows             attention that each key of such a cache receives
    write_rows            fresh keys and values, written into such caches
    CacheAddresses        where the caches of several prompts lie; CacheShape, LayerBuffers: their layers
    attention_mass        attention that each key receives from the given rows
    rotate_keys           rotary keys, moved to new positions while they are copied into a cache
    Turn                  how keys or values rotate with position
    Deltas                how far tokens move
    place_layer           one layer of a prompt's stored chunks, moved, decoded and corrected while copied into the cache
    placing_fault         whether the kernel of `place_layer` can be trusted on this machine
    PlacingTable          which rows of which chunks go where in a prompt, for `place_layer`
    ChunkKV               keys and values of a chunk in one piece of memory; ChunkShape, LayerShape: their shapes
    rms_norm, silu_mul    RMSNorm, and the gated activation of an MLP, in one pass over memory each

Each op with an argument `backend` runs as a Triton kernel on a GPU and in plain torch elsewhere; the argument forces one.
Importing this package loads no torch, triton or GPU driver before the first use of a name.

What comes in and goes out. Queries are `[batch, heads, rows, head_dim]`, keys and values `[batch, kv_heads, keys, dim]`, and
`positions[r]` is the last key that row r sees. Attention gives `[batch, heads, rows, value_dim]` and a log-sum-exp, masses
`[batch, heads, keys]`. `place_layer` reads `ChunkKV`s by a `PlacingTable` and writes `[kv_heads, capacity, head_dim]`. Wrong
arguments are refused in one line (`checks`).

How to read it: `attention` (the public op) -> `checks` -> `work` (the call as a value) -> `backend` (Triton or torch) ->
`attention_plain` (the twin, which says what is computed) -> `attention_launch` -> `attention_kernel`. Every other op has the
same tiers; the table in kernels/README.md names their files and derives the formulas.

To add a kernel: write the plain-torch twin and a test against dense float64 in tests/kernels, then the jit function and its
launcher (names as in kernels/README.md), a public op that checks its arguments and chooses by `choose_backend`, its name
here, and its variants in scripts/aot/variants.py, so that `scripts/aot_report` counts registers and spills.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blend_kernels.addressed import attend_rows, mass_rows, write_rows
    from blend_kernels.attention import selective_attention
    from blend_kernels.backend import Backend
    from blend_kernels.cache_addresses import CacheAddresses, CacheShape, LayerBuffers
    from blend_kernels.chunk_kv import ChunkKV, ChunkShape, LayerShape, Packing
    from blend_kernels.decode import decode_attention
    from blend_kernels.elementwise import rms_norm, silu_mul
    from blend_kernels.mass import attention_mass
    from blend_kernels.placing import place_layer
    from blend_kernels.placing_table import PlacingTable
    from blend_kernels.positions import Positions
    from blend_kernels.rotation import Deltas, Turn, rotate_keys
    from blend_kernels.self_check import placing_fault

__all__ = [
    "Backend",
    "CacheAddresses",
    "CacheShape",
    "ChunkKV",
    "ChunkShape",
    "Deltas",
    "LayerBuffers",
    "LayerShape",
    "Packing",
    "PlacingTable",
    "Positions",
    "Turn",
    "attend_rows",
    "attention_mass",
    "decode_attention",
    "mass_rows",
    "place_layer",
    "placing_fault",
    "rms_norm",
    "rotate_keys",
    "selective_attention",
    "silu_mul",
    "write_rows",
]

_HOME = {
    "Backend": "backend",
    "CacheAddresses": "cache_addresses",
    "CacheShape": "cache_addresses",
    "ChunkKV": "chunk_kv",
    "ChunkShape": "chunk_kv",
    "Deltas": "rotation",
    "LayerBuffers": "cache_addresses",
    "LayerShape": "chunk_kv",
    "Packing": "chunk_kv",
    "PlacingTable": "placing_table",
    "Positions": "positions",
    "Turn": "rotation",
    "attend_rows": "addressed",
    "attention_mass": "mass",
    "decode_attention": "decode",
    "mass_rows": "addressed",
    "place_layer": "placing",
    "placing_fault": "self_check",
    "rms_norm": "elementwise",
    "rotate_keys": "rotation",
    "selective_attention": "attention",
    "silu_mul": "elementwise",
    "write_rows": "addressed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
