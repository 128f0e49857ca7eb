"""The variants compiled ahead of time: what is used most by name, everything else by pairs of options.

Launches are recorded from the ops' own launchers on memory that is reserved and never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from aot.compiling import Launch, Resources, compile_launch, record
from aot.pairs import Chosen, covering
from blend_kernels.attention_kernel import attend_tile, combine_splits
from blend_kernels.attention_launch import launch_attention
from blend_kernels.checks import Layout, Mode, Rule, Work
from blend_kernels.chunk_kv import ChunkKV, ChunkShape, LayerShape, Packing
from blend_kernels.deviation_kernel import deviation_rows, launch_deviation
from blend_kernels.elementwise_kernel import gate_elements, launch_rms_norm, launch_silu_mul, norm_rows
from blend_kernels.mass_kernel import mass_from_lse, mass_tile
from blend_kernels.placing_kernel import launch_placing, place_tiles
from blend_kernels.placing_table import PlacingTable, Turn
from blend_kernels.rotation_kernel import launch_rotation, rotate_tile
from blend_kernels.tiles import Shape, Tile, candidates

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
# Head dimension of queries and keys, and of values.
WIDTHS = {f"{dim}": (dim, dim) for dim in (32, 64, 80, 96, 112, 128, 192, 256)} | {"192/128": (192, 128)}
# The widths that `tiles` has tables for, where every candidate is compiled.
TABLES = ("64", "128", "192/128", "256")
KEYS = 4096
# Folded rows of a call with many.
MANY = 4096

Options = Mapping[str, Mapping[Any, str]]
"""Of an op: its options, and the word for each value, if it needs one. The first values make the plain call."""


class Variant(NamedTuple):
    """A name for the table, tile (None without a choice), its place in the tuner's list, the launch, and how it was chosen."""

    name: str
    tile: Tile | None
    place: int
    launch: Launch
    by_pairs: bool = False

    def compile(self, capability: int) -> Resources:
        """Registers, spills and shared memory on this compute capability (80, 90, 100)."""
        return compile_launch(self.launch, capability)


def variants(capability: int) -> Iterator[Variant]:
    """All variants for a compute capability, each once."""
    seen = set()
    for variant in chain(_attention(capability), *map(_of_op, _OPS)):
        if (variant.name, variant.tile) not in seen:  # pairs may repeat what has a name already
            yield variant
        seen.add((variant.name, variant.tile))


def _by_pairs(options: Options) -> list[Chosen]:
    return covering({option: list(words) for option, words in options.items()})


def _name(options: Options, choice: Chosen, heads: int) -> str:
    """The words of a choice; commas stand behind the first `heads`."""
    words = [options[option][value] for option, value in choice.items()]
    return ", ".join([" ".join(words[:heads]), *filter(None, words[heads:])])


_WIDTHS = {width: width for width in WIDTHS}
_KINDS = {kind: kind for kind in DTYPES}
_RULE: Options = {
    "mode": {"exact": "", "bottom-right": "bottom-right"},
    "window": {None: "", KEYS: "window"},
    "softcap": {None: "", 50.0: "soft-cap"},
}


def _work(
    width: str,
    dtype: torch.dtype,
    lines: int = MANY,
    group: int = 4,
    mode: Mode = "exact",
    window: int | None = None,
    softcap: float | None = None,
) -> Work:
    dim, value_dim = WIDTHS[width]
    rows = max(1, lines // group)
    q = torch.empty(1, rows, 8 * group, dim, dtype=dtype).transpose(1, 2)
    k = torch.empty(1, 8, KEYS, dim, dtype=dtype)
    v = torch.empty(1, 8, KEYS, value_dim, dtype=dtype)
    return Work(q, k, v, torch.empty(rows, dtype=torch.int64), Rule(mode, window, softcap, dim**-0.5))


class Call(NamedTuple):
    """One attention call: its name, its work, into how many parts the keys are cut, and what it returns."""

    name: str
    work: Work
    splits: int = 1
    want_lse: bool = False
    every_tile: bool = False
    by_pairs: bool = False


def _attention(capability: int) -> Iterator[Variant]:
    """Calls with their first tile, or with every candidate."""
    for call in (*_plain_calls(), *_named_calls(), *map(_paired_call, _by_pairs(_ATTENTION))):
        work = call.work
        lines = work.q.shape[2] * work.group
        shape = Shape(work.q.dtype, work.q.shape[3], work.value_dim, lines, work.rule.window is not None, True)
        tiles = candidates(capability // 10, shape)
        for place, tile in enumerate(tiles if call.every_tile else tiles[:1]):
            with record(attend_tile, combine_splits) as notes:
                launch_attention(work, tile, call.splits, call.want_lse)
            yield Variant(f"attend {call.name}", tile, place, notes[0], call.by_pairs)
        if len(notes) > 1:
            yield Variant(f"combine {call.name}", None, 0, notes[1], call.by_pairs)


def _plain_calls() -> Iterator[Call]:
    """bf16 and fp32 of every width for many rows, and bf16 for one row (decode); what the tuner may choose once per table."""
    for width in WIDTHS:
        every_tile = width in TABLES
        group = 1 if width == "192/128" else 4  # latent attention is expanded: as many KV heads as query heads
        for kind in ("bf16", "fp32"):
            yield Call(f"{kind} {width}", _work(width, DTYPES[kind], group=group), every_tile=every_tile)
        decoding = _work(width, BF16, lines=1, group=group)
        yield Call(f"bf16 {width} split, 1 row", decoding, 16, every_tile=every_tile)
    yield Call("fp16 128", _work("128", FP16))


def _named_calls() -> Iterator[Call]:
    """What models ask for: windows, soft-caps, sinks, short suffixes."""
    for width in TABLES:
        yield Call(f"bf16 {width} window", _work(width, BF16, window=KEYS), every_tile=True)
    yield Call("bf16 256 window soft-cap", _work("256", BF16, window=KEYS, softcap=50.0))
    yield Call("bf16 64 window sinks", _work("64", BF16, window=128)._replace(sinks=torch.empty(32, dtype=BF16)))
    yield Call("bf16 128 bottom-right", _work("128", BF16, mode="bottom-right"))
    yield Call("bf16 128 and lse", _work("128", BF16), want_lse=True)
    yield Call("bf16 128 lse only", _work("128", BF16)._replace(v=None))
    for lines in (32, 64, 256):
        yield Call(f"bf16 128 split, {lines // 4} rows", _work("128", BF16, lines=lines), 4, every_tile=True)


_ATTENTION: Options = {
    "kind": _KINDS,
    "width": _WIDTHS,
    **_RULE,
    "sinks": {False: "", True: "sinks"},
    "lines": {lines: f"{lines} lines" for lines in (16, 32, 64, MANY)},
    "splits": {1: "", 4: "split 4", 128: "split 128"},
    "result": {result: result for result in ("out", "out and lse", "lse")},
    "group": {group: f"group {group}" for group in (1, 4, 7, 8)},
    "index": {torch.int64: "", torch.int32: "int32"},
}


def _paired_call(c: Chosen) -> Call:
    dtype = DTYPES[c["kind"]]
    work = _work(c["width"], dtype, c["lines"], c["group"], c["mode"], c["window"], c["softcap"])
    work = work._replace(
        v=None if c["result"] == "lse" else work.v,
        positions=torch.empty(work.q.shape[2], dtype=c["index"]),
        sinks=torch.empty(8 * c["group"], dtype=dtype) if c["sinks"] else None,
    )
    return Call(_name(_ATTENTION, c, 2), work, c["splits"], c["result"] != "out", by_pairs=True)


class Op(NamedTuple):
    """Any other op. heads: how many options are its name's first words. named: what is used most, but for plain options."""

    name: str
    kernel: Any
    options: Options
    heads: int
    named: Sequence[Chosen]
    launch: Callable[[Chosen], object]


def _of_op(op: Op) -> Iterator[Variant]:
    plain = {option: next(iter(words)) for option, words in op.options.items()}
    choices = [({**plain, **named}, False) for named in op.named]
    choices += [(choice, True) for choice in _by_pairs(op.options)]
    for choice, by_pairs in choices:
        with record(op.kernel) as notes:
            op.launch(choice)
        yield Variant(f"{op.name} {_name(op.options, choice, op.heads)}", None, 0, notes[0], by_pairs)


def _launch_mass(c: Chosen) -> None:
    work = _work(c["width"], DTYPES[c["kind"]], MANY, c["group"], c["mode"], c["window"], c["softcap"])
    mass_from_lse(work, work.empty_lse(), c["reduce"], c["last"])


def _launch_rotation(c: Chosen) -> None:
    k = torch.empty(1, 8, KEYS, c["dim"], dtype=c["source"])
    pairs, offset = _turning(c)
    delta = 7 if c["delta"] == "int" else torch.empty(KEYS, dtype=torch.int64)
    layout = Layout(pairs, offset, c["interleaved"])
    launch_rotation(k, delta, torch.empty(pairs, dtype=c["freq"]), layout, torch.empty_like(k, dtype=c["out"]))


def _turning(c: Chosen) -> tuple[int, int]:
    """Pairs that turn, and the first of their dimensions: all, a quarter, the second half ("tail"), or none."""
    dim = c.get("dim") or WIDTHS[c["width"]][0]
    return {"all": (dim // 2, 0), "quarter": (dim // 8, 0), "tail": (dim // 4, dim // 2), "none": (0, 0)}[c["turns"]]


def _launch_deviation(c: Chosen) -> None:
    def pair(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        new, old = (torch.empty(1, 8, KEYS, dim, dtype=dtype) for dtype in c["dtypes"])
        return new, old

    key_dim, value_dim = WIDTHS[c["width"]]
    keys = pair(key_dim) if "k" in c["parts"] else None
    launch_deviation(keys, pair(value_dim) if "v" in c["parts"] else None, c["norm"])


def _launch_norm(c: Chosen) -> None:
    states = torch.empty(KEYS, c["dim"], dtype=DTYPES[c["kind"]])
    launch_rms_norm(states, torch.empty_like(states[0]), 1e-6, c["plus_one"], c["rounds_first"])


def _launch_gate(c: Chosen) -> None:
    launch_silu_mul(*torch.empty(2, KEYS, dtype=DTYPES[c["kind"]]))


def _launch_placing(c: Chosen) -> None:
    """Sixteen chunks of 256 tokens."""
    places, tokens, heads = 16, KEYS // 16, 8
    dim, value_dim = WIDTHS[c["width"]]
    packing: Packing = c["source"] if c["source"] in ("int8", "int4") else "plain"
    shape = ChunkShape((LayerShape(heads, dim, heads, value_dim),), DTYPES.get(c["source"], BF16), packing)
    chunk = ChunkKV(shape, tokens, torch.empty(shape.nbytes(tokens), dtype=torch.uint8))
    starts = np.arange(places) * tokens
    zeros = np.zeros(places, dtype=np.int64)
    absolute = {"none": zeros > 0, "some": starts > 0, "all": starts >= 0}[c["absolute"]]
    table = PlacingTable([chunk] * places, zeros, starts, zeros + tokens, starts, absolute, torch.device("cpu"))
    pairs, offset = _turning(c)
    turn = Turn(torch.empty(pairs, dtype=torch.float64), c["interleaved"], offset) if pairs else None
    gain = None if c["gain"] is None else torch.empty(1, KEYS, heads * (dim + value_dim), dtype=c["gain"])
    keys, values = (torch.empty(1, heads, KEYS, width, dtype=c["out"]) for width in (dim, value_dim))
    launch_placing(table, 0, keys, values, turn, None, gain)


_INTERLEAVED = {False: "", True: "pairs"}
_TURNS = {"all": "", "quarter": "quarter", "tail": "tail"}
_MASS: Options = {
    "kind": _KINDS,
    "width": {width: width for width in ("128", "32", "64", "80", "96", "112", "192", "256")},
    "reduce": {"sum": "", "max": "peaks"},
    "last": {False: "", True: "last row"},
    **_RULE,
    "group": {4: "", 1: "group 1", 7: "group 7"},
}
_ROTATION: Options = {
    "source": {BF16: "bf16", FP16: "fp16", FP32: "fp32"},
    "out": {BF16: "to bf16", FP32: "to fp32"},
    "dim": {128: "128", 80: "80", 192: "192"},
    "turns": _TURNS,
    "interleaved": _INTERLEAVED,
    "delta": {"per token": "", "int": "one delta"},
    "freq": {torch.float64: "", FP32: "fp32 frequencies"},
}
_DEVIATION: Options = {
    "dtypes": {(BF16, BF16): "bf16", (FP16, FP16): "fp16", (FP32, FP32): "fp32", (FP32, BF16): "fp32 - bf16"},
    "width": {"128": "128", "80": "80", "192/128": "192/128"},
    "parts": {"kv": "kv", "k": "k", "v": "v"},
    "norm": {"l2sq": "l2sq", "l1": "l1"},
}
_NORM: Options = {
    "kind": _KINDS,
    "dim": {dim: f"{dim}" for dim in (4096, 64, 96, 128, 8192)},
    "plus_one": {False: "", True: "plus one"},
    "rounds_first": {True: "", False: "one rounding"},
}
_PLACING: Options = {
    "source": {source: source for source in ("bf16", "fp16", "fp32", "int8", "int4")},
    "out": {BF16: "to bf16", FP32: "to fp32"},
    "width": {width: width for width in ("128", "64", "80", "192/128", "256")},
    "turns": {**_TURNS, "none": "none"},
    "interleaved": _INTERLEAVED,
    "gain": {None: "", BF16: "gain bf16", FP32: "gain fp32"},
    "absolute": {"none": "", "some": "some without positions", "all": "all without positions"},
}
_PACKED = [{"source": packing, "absolute": "all"} for packing in ("int8", "int4")]
_OPS = (
    Op(
        *("mass", mass_tile, _MASS, 2),
        [{}, {"width": "64"}, {"width": "256"}, {"kind": "fp32"}, {"reduce": "max", "last": True}],
        _launch_mass,
    ),
    Op("rotate", rotate_tile, _ROTATION, 3, [{}, {"interleaved": True}, {"turns": "quarter"}], _launch_rotation),
    Op("deviation", deviation_rows, _DEVIATION, 2, [{}], _launch_deviation),
    Op(
        *("place", place_tiles, _PLACING, 3),
        [
            *({"width": width} for width in ("64", "80", "128", "256")),
            *({"interleaved": True}, {"width": "192/128", "turns": "tail"}, {"gain": FP32}),
            *(_PACKED + [{**packed, "gain": FP32} for packed in _PACKED]),
        ],
        _launch_placing,
    ),
    Op(
        *("norm", norm_rows, _NORM, 2),
        [{"dim": 128}, {}, {"dim": 8192}, {"plus_one": True, "rounds_first": False}],
        _launch_norm,
    ),
    Op("gate", gate_elements, {"kind": _KINDS}, 1, [{"kind": kind} for kind in DTYPES], _launch_gate),
)
