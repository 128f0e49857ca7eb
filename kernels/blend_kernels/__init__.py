"""Attention of scattered rows over a blended KV cache, with the copies and scores that blending needs.

    selective_attention   softmax attention of rows at given positions over all keys, without a mask in memory
    decode_attention      softmax attention of one row over all keys
    attention_mass        attention that each key receives from the given rows
    rotate_keys           rotary keys, moved to new positions while they are copied into a cache
    Deltas                moves of many calls of `rotate_keys` that share tables
    kv_deviation          distance of fresh from stored keys and values, row by row

Each op runs as a Triton kernel on a GPU and in plain torch elsewhere, with the same arguments (`backend=` forces one).
Importing this package loads no torch, triton or GPU driver before the first use of a name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blend_kernels.attention import selective_attention
    from blend_kernels.decode import decode_attention
    from blend_kernels.deviation import kv_deviation
    from blend_kernels.mass import attention_mass
    from blend_kernels.rotation import Deltas, rotate_keys

__all__ = ["Deltas", "attention_mass", "decode_attention", "kv_deviation", "rotate_keys", "selective_attention"]

_HOME = {
    "Deltas": "rotation",
    "attention_mass": "mass",
    "decode_attention": "decode",
    "kv_deviation": "deviation",
    "rotate_keys": "rotation",
    "selective_attention": "attention",
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
