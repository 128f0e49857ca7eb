"""The variants compiled ahead of time, recorded from the ops' own launchers: what is used most by name, all else by pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from aot.compiling import Launch, record
from aot.pairs import Chosen, covering
from blend_kernels.addressed_kernel import attend_addressed, choose_tile, launch_attend, launch_write, write_row
from blend_kernels.attention_kernel import attend_tile, merge_parts
from blend_kernels.attention_launch import launch_attention
from blend_kernels.cache_addresses import AddressedRows, CacheAddresses, CacheShape
from blend_kernels.chunk_kv import ChunkKV, ChunkShape, LayerShape, Packing
from blend_kernels.elementwise_kernel import gate_elements, launch_rms_norm, launch_silu_mul, norm_rows
from blend_kernels.mass_kernel import launch_addressed_mass, launch_mass, mass_addressed, mass_tile
from blend_kernels.placing_kernel import place_tiles
from blend_kernels.placing_launch import launch_placing
from blend_kernels.placing_table import PlacingTable
from blend_kernels.positions import Positions
from blend_kernels.rotation import Turn
from blend_kernels.tiles import Shape, Tile, best_tile
from blend_kernels.work import Rule, Work, empty_results

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Head dimension of queries and keys, and of values.
WIDTHS = {f"{dim}": (dim, dim) for dim in (32, 64, 80, 96, 112, 128, 192, 256)} | {"192/128": (192, 128)}
# The widths that `tiles` has tables for.
TABLES = ("64", "128", "192/128", "256")
KEYS = 4096
# Folded rows of a call with many.
MANY = 4096


class Variant(NamedTuple):
    """A name for the table, the tile (None without a choice), the launch, and whether it stands for pairs of options."""

    name: str
    tile: Tile | None
    launch: Launch
    by_pairs: bool = False


def variants(capability: int) -> Iterator[Variant]:
    """All variants for a compute capability (80, 90, 100)."""
    names: set[str] = set()
    kernels = (
        _attention_variants(capability),
        _addressed_variants(capability),
        _mass_variants(),
        _placing_variants(),
        _elementwise_variants(),
    )
    for variant in chain(*kernels):
        if variant.name not in names:  # pairs may repeat what has a name already
            yield variant
        names.add(variant.name)


def _choices(named: Iterable[Chosen], options: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Chosen, bool]]:
    """What is used most by name, then every pair of options; and whether it stands for pairs."""
    yield from ((choice, False) for choice in named)
    yield from ((choice, True) for choice in covering(options))


def _work(width: str, dtype: torch.dtype, lines: int, group: int, window: int | None, softcap: float | None) -> Work:
    dim, value_dim = WIDTHS[width]
    rows = max(1, lines // group)
    q = torch.empty(1, rows, 8 * group, dim, dtype=dtype).transpose(1, 2)
    k = torch.empty(1, 8, KEYS, dim, dtype=dtype)
    v = torch.empty(1, 8, KEYS, value_dim, dtype=dtype)
    positions = Positions(torch.empty(rows, dtype=torch.int64))
    return Work(q, k, v, positions, Rule(window, softcap, dim**-0.5))


def _attention_variants(capability: int) -> Iterator[Variant]:
    """Many rows, one row of decoding, short suffixes; what models ask for: windows, soft-caps, sinks."""
    plain: Chosen = {
        "kind": "bf16", "width": "128", "window": None, "softcap": None, "sinks": False, "lines": MANY, "splits": 1, "group": 4,
    }  # fmt: skip
    named: Sequence[Chosen] = [
        *({**plain, "kind": kind, "width": width} for kind in ("bf16", "fp32") for width in WIDTHS),
        {**plain, "kind": "fp16"},
        *({**plain, "width": width, "lines": 1, "splits": 16} for width in WIDTHS),
        *({**plain, "width": width, "window": KEYS} for width in TABLES),
        {**plain, "width": "256", "window": KEYS, "softcap": 50.0},
        {**plain, "width": "64", "window": 128, "sinks": True},
        *({**plain, "lines": lines, "splits": 4} for lines in (32, 64, 256)),
        {**plain, "width": "64", "lines": 256, "splits": 4},
    ]
    options = {
        "kind": tuple(DTYPES), "width": tuple(WIDTHS), "window": (None, KEYS), "softcap": (None, 50.0), "sinks": (False, True),
        "lines": (16, 32, 64, MANY), "splits": (1, 4, 128), "group": (1, 4, 7, 8),
    }  # fmt: skip
    for c, by_pairs in _choices(named, options):
        dtype = DTYPES[c["kind"]]
        # Latent attention has as many KV heads as query heads when it is expanded.
        group = 1 if c["width"] == "192/128" and not by_pairs else c["group"]
        work = _work(c["width"], dtype, c["lines"], group, c["window"], c["softcap"])
        work = work._replace(sinks=torch.empty(8 * group, dtype=dtype) if c["sinks"] else None)
        lines = work.q.shape[2] * work.group
        shape = Shape(dtype, work.q.shape[3], work.value_dim, lines, work.rule.window is not None, True)
        tile = best_tile(capability // 10, shape)
        with record(attend_tile, merge_parts) as notes:
            launch_attention(work, tile, c["splits"])
        rows = "1 row" if c["lines"] == 1 else c["lines"] < MANY and f"{c['lines']} lines"
        name = _name(
            f"{c['kind']} {c['width']}", c["window"] and "window", c["softcap"] and "soft-cap", c["sinks"] and "sinks",
            rows, c["splits"] > 1 and f"split {c['splits']}", by_pairs and f"group {group}",
        )  # fmt: skip
        yield Variant(f"attend {name}", tile, notes[0], by_pairs)
        if len(notes) > 1:
            yield Variant(f"merge {name}", None, notes[1], by_pairs)


def _name(*words: str | bool | None) -> str:
    """The words that are said, with commas."""
    return ", ".join(word for word in words if isinstance(word, str) and word)


def _addressed_variants(capability: int) -> Iterator[Variant]:
    """Over caches whose addresses stand in a table: rows alone (decoding) and rows of one prompt (chosen rows)."""
    plain: Chosen = {
        "kind": "bf16", "width": "128", "rows": 8, "window": None, "softcap": None, "sinks": False, "splits": 1, "group": 4,
    }  # fmt: skip
    named: Sequence[Chosen] = [
        *({**plain, "width": width, "rows": rows} for width in WIDTHS for rows in (8, KEYS // 8)),
        {**plain, "kind": "fp32"},
        {**plain, "splits": 16},
        {**plain, "window": KEYS},
    ]
    options = {
        "kind": ("bf16", "fp16"), "width": tuple(WIDTHS), "rows": (1, 16, KEYS // 8), "window": (None, KEYS),
        "softcap": (None, 50.0), "sinks": (False, True), "splits": (1, 16), "group": (1, 4, 7),
    }  # fmt: skip
    for choice, by_pairs in _choices(named, options):
        dtype = DTYPES[choice["kind"]]
        rows = _addressed_rows(choice, dtype)
        tile = choose_tile(rows, capability // 10)
        name = _name(
            f"{choice['kind']} {choice['width']}", f"{choice['rows']} rows", choice["window"] and "window",
            choice["softcap"] and "soft-cap", choice["sinks"] and "sinks", choice["splits"] > 1 and "split",
            by_pairs and f"group {choice['group']}",
        )  # fmt: skip
        keys, values = (torch.empty(1, 8, choice["rows"], dim, dtype=dtype) for dim in WIDTHS[choice["width"]])
        lse = torch.empty(rows.q.shape[1], choice["rows"])
        with record(attend_addressed, merge_parts, write_row, mass_addressed) as notes:
            launch_attend(rows, tile, choice["splits"])
            if not (by_pairs or choice["window"]):
                launch_write(rows.table, 0, keys, values, rows.positions, rows.positions)
                launch_addressed_mass(rows, lse, KEYS, peak=True)
        ops = {attend_addressed: "attend", write_row: "write", mass_addressed: "mass"}
        for note in notes:
            if note.kernel in ops:  # parts are merged as above
                op = ops[note.kernel]
                yield Variant(f"{op} at addresses {name}", tile if op == "attend" else None, note, by_pairs)


def _addressed_rows(choice: Chosen, dtype: torch.dtype) -> AddressedRows:
    dim, value_dim = WIDTHS[choice["width"]]
    shape = CacheShape(8, dim, value_dim)
    table = CacheAddresses(8, [shape], torch.device("cpu"), dtype).table
    heads = 8 * choice["group"]
    q = torch.empty(1, choice["rows"], heads, dim, dtype=dtype).transpose(1, 2)
    positions = torch.empty(choice["rows"], dtype=torch.int64)
    rule = Rule(choice["window"], choice["softcap"], dim**-0.5)
    sinks = torch.empty(heads, dtype=dtype) if choice["sinks"] else None
    return AddressedRows(table, 0, shape, q, positions, positions, rule, sinks)


def _mass_variants() -> Iterator[Variant]:
    plain: Chosen = {"kind": "bf16", "width": "128", "window": None, "softcap": None, "peak": False, "group": 4}
    named: Sequence[Chosen] = [
        *({**plain, "width": width} for width in ("64", "128", "256")),
        {**plain, "kind": "fp32"},
        {**plain, "peak": True},
    ]
    options = {
        "kind": tuple(DTYPES), "width": tuple(width for width in WIDTHS if "/" not in width),
        "window": (None, KEYS), "softcap": (None, 50.0), "peak": (False, True), "group": (1, 4, 7),
    }  # fmt: skip
    for choice, by_pairs in _choices(named, options):
        width = choice["width"]
        dtype = DTYPES[choice["kind"]]
        work = _work(width, dtype, MANY, choice["group"], choice["window"], choice["softcap"])
        name = _name(
            f"{choice['kind']} {width}", choice["peak"] and "peaks", choice["window"] and "window",
            choice["softcap"] and "soft-cap", by_pairs and f"group {choice['group']}",
        )  # fmt: skip
        _, lse = empty_results(work.q, work.value_dim)
        with record(mass_tile) as notes:
            launch_mass(work, lse, choice["peak"])
        yield Variant(f"mass {name}", None, notes[0], by_pairs)


def _elementwise_variants() -> Iterator[Variant]:
    """Norms of hidden states and of heads, and gated activations."""
    plain: Chosen = {"kind": "bf16", "dim": 4096, "plus_one": False, "rounds_first": True}
    named: Sequence[Chosen] = [
        *({**plain, "dim": dim} for dim in (128, 4096, 8192)),
        {**plain, "plus_one": True, "rounds_first": False},
    ]
    options = {
        "kind": tuple(DTYPES), "dim": (64, 96, 128, 4096, 8192), "plus_one": (False, True), "rounds_first": (False, True),
    }  # fmt: skip
    for choice, by_pairs in _choices(named, options):
        dtype = DTYPES[choice["kind"]]
        dim = choice["dim"]
        with record(norm_rows) as notes:
            states = torch.empty(KEYS, dim, dtype=dtype)
            weight = torch.empty(dim, dtype=dtype)
            launch_rms_norm(states, weight, 1e-6, choice["plus_one"], choice["rounds_first"])
        once = not choice["rounds_first"] and "one rounding"
        name = _name(f"{choice['kind']} {dim}", choice["plus_one"] and "plus one", once)
        yield Variant(f"norm {name}", None, notes[0], by_pairs)
    for kind, dtype in DTYPES.items():
        with record(gate_elements) as notes:
            launch_silu_mul(*torch.empty(2, KEYS, dtype=dtype))
        yield Variant(f"gate {kind}", None, notes[0])


def _placing_variants() -> Iterator[Variant]:
    plain: Chosen = {
        "source": "bf16", "out": "bf16", "width": "128", "turns": "all", "interleaved": False, "gain": None, "absolute": "none",
    }  # fmt: skip
    named: Sequence[Chosen] = [
        *({**plain, "width": width} for width in ("64", "80", "128", "256")),
        {**plain, "interleaved": True},
        {**plain, "width": "192/128", "turns": "tail"},
        {**plain, "gain": "fp32"},
        *({**plain, "source": packing, "absolute": "all"} for packing in ("int8", "int4")),
        *({**plain, "source": packing, "absolute": "all", "gain": "fp32"} for packing in ("int8", "int4")),
    ]
    options = {
        "source": ("bf16", "fp16", "fp32", "int8", "int4"), "out": ("bf16", "fp32"), "width": ("64", "80", "128", "192/128"),
        "turns": ("all", "quarter", "tail", "none"), "interleaved": (False, True), "gain": (None, "bf16", "fp32"),
        "absolute": ("none", "some", "all"),
    }  # fmt: skip
    for choice, by_pairs in _choices(named, options):
        with record(place_tiles) as notes:
            _record_placing(choice)
        name = _name(
            f"{choice['source']} to {choice['out']} {choice['width']}", choice["turns"] != "all" and choice["turns"],
            choice["interleaved"] and "pairs", choice["gain"] and f"gain {choice['gain']}",
            choice["absolute"] != "none" and f"{choice['absolute']} without positions",
        )  # fmt: skip
        yield Variant(f"place {name}", None, notes[0], by_pairs)


def _record_placing(chosen: Chosen) -> None:
    """Launch with these options for sixteen chunks of 256 tokens."""
    places, tokens, heads = 16, KEYS // 16, 8
    dim, value_dim = WIDTHS[chosen["width"]]
    packing: Packing = "plain"
    if chosen["source"] in ("int8", "int4"):
        packing = chosen["source"]
    shape = ChunkShape(
        (LayerShape(heads, dim, heads, value_dim),), DTYPES.get(chosen["source"], torch.bfloat16), packing
    )
    chunk = ChunkKV(shape, tokens, torch.empty(shape.nbytes(tokens), dtype=torch.uint8))
    starts = np.arange(places) * tokens
    zeros = np.zeros(places, dtype=np.int64)
    absolute = {"none": zeros > 0, "some": starts > 0, "all": starts >= 0}[chosen["absolute"]]
    table = PlacingTable([chunk] * places, zeros, starts, zeros + tokens, starts, absolute, torch.device("cpu"))
    turning = {"all": (dim // 2, 0), "quarter": (dim // 8, 0), "tail": (dim // 4, dim // 2), "none": (0, 0)}
    pairs, offset = turning[chosen["turns"]]
    turn = Turn(torch.empty(pairs, dtype=torch.float64), chosen["interleaved"], offset) if pairs else None
    gain = chosen["gain"] and torch.empty(1, KEYS, heads * (dim + value_dim), dtype=DTYPES[chosen["gain"]])
    keys, values = (torch.empty(1, heads, KEYS, width, dtype=DTYPES[chosen["out"]]) for width in (dim, value_dim))
    launch_placing(table, 0, keys, values, turn, None, gain)
