"""Time to first token of one shape with random weights: methods and stores, each row written as soon as it is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from _results import Results, Row, say
from _shapes import SHAPES, random_decoder, random_ids, random_layout
from _stores import copy_rate, drop_page_cache, file_system, fill, lacks_room, move, read_rate
from blend.blender import Blend, Blender
from blend.config import BlendConfig
from blend.eval.evaluator import PLAIN_REUSE, floor_seconds
from blend.model.decoder import full_prefill
from blend.store import ChunkStore, open_store
from blend.store.disk import DiskBackend

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.types import PromptLayout

METHODS = {
    "reuse": PLAIN_REUSE,
    "query_guided 5 %": BlendConfig(selector="query_guided", ratio=0.05),
    "query_guided 15 %": BlendConfig(selector="query_guided", ratio=0.15),
    "hkvd 15 %": BlendConfig(selector="hkvd", ratio=0.15),
}
STORES = ("memory", "disk", "disk-cold")  # where the caches may lie, in the order in which they are measured
FULL = "full"
RANDOM = "random weights: times, bytes and memory mean something, answers and which rows a selector finds do not"
_STAGES = ("load", "reposition", "select", "recompute")


class NotColdError(Exception):
    """The page cache still holds what it was asked to forget."""


@dataclass(frozen=True)
class Plan:
    """What is measured at one shape. folder: where the disk store is made."""

    shape: str
    device: torch.device
    dtype: torch.dtype
    chunk_tokens: int
    codec: str
    correction: str
    rounds: int
    stores: tuple[str, ...]
    folder: Path

    def key(self, tokens: int, store: str, method: str) -> dict[str, object]:
        """What tells a row from others: everything that its meaning depends on."""
        about: dict[str, object] = {"device": self.device.type, "dtype": str(self.dtype).removeprefix("torch.")}
        about |= {"chunk_tokens": self.chunk_tokens, "codec": self.codec, "correction": self.correction}
        return {"shape": self.shape, "tokens": tokens, "store": store, "method": method, **about}

    def rows(self) -> list[tuple[str, str]]:
        """Store and method of every row of a length; full prefill has no store."""
        return [("", FULL), *((store, method) for store in self.stores for method in METHODS)]


class Bench:
    """Measures a plan into `results`; with `resume` existing rows stay as they are."""

    def __init__(self, plan: Plan, results: Results, *, resume: bool) -> None:
        self.plan, self.results, self.resume = plan, results, resume

    @cached_property
    def decoder(self) -> Decoder:
        """Made when the first row needs it."""
        return random_decoder(self.plan.shape, self.plan.device, self.plan.dtype)

    def run(self, lengths: Iterable[int]) -> list[Row]:
        """The rows of these lengths, measured now or before."""
        found = []
        for tokens in lengths:
            if missing := [names for names in self.plan.rows() if not (self.resume and self._row(tokens, names))]:
                self._measure(tokens, missing)
            found += [row for names in self.plan.rows() if (row := self._row(tokens, names))]
        return found

    def _row(self, tokens: int, names: tuple[str, str]) -> Row | None:
        return self.results.find("ttft", self.plan.key(tokens, *names))

    def _measure(self, tokens: int, missing: list[tuple[str, str]]) -> None:
        plan, shape = self.plan, SHAPES[self.plan.shape]
        reason = None if "decoder" in self.__dict__ else shape.why_not(tokens, plan.device, plan.dtype.itemsize)
        if reason:
            self._skip(tokens, missing, reason)
            return
        layout = random_layout(shape.vocab_size, tokens, plan.chunk_tokens)
        if ("", FULL) in missing:
            self._full(layout, tokens)
        if any(store for store, _ in missing):
            self._stored(layout, tokens, missing)

    def _skip(self, tokens: int, rows: Iterable[tuple[str, str]], reason: str) -> None:
        """Write into the rows why they have no figures."""
        say(f"{self.plan.shape}, {tokens} tokens: {reason}")
        for names in rows:
            self.results.put("ttft", self.plan.key(tokens, *names), {"why_not": reason})

    def _full(self, layout: PromptLayout, tokens: int) -> None:
        def prefill() -> tuple[float, Row]:
            done = full_prefill(self.decoder, layout)
            return done.ttft_s, {"wrong": None if bool(done.logits.isfinite().all()) else "logits are not finite"}

        self._timed(tokens, ("", FULL), layout, prefill, lambda seconds, row: {"speedup": 1.0})

    def _stored(self, layout: PromptLayout, tokens: int, missing: list[tuple[str, str]]) -> None:
        """Fill a store in memory, then measure store after store, each emptied into the next."""
        vocabulary, size = SHAPES[self.plan.shape].vocab_size, self.plan.chunk_tokens
        others = [random_ids(vocabulary, size, 100 + number) for number in range(16)]
        store = open_store("memory:", codec=self.plan.codec)
        fill(self.decoder, store, layout, others, self.plan.correction)
        for name in STORES:
            methods = [method for wanted, method in missing if wanted == name]
            reason = lacks_room(self.plan.folder, store.stats().nbytes) if name == "disk" else None
            if methods and reason:
                self._skip(tokens, [(name, method) for method in methods], reason)
            elif methods:
                if name != "memory" and not isinstance(store.backend, DiskBackend):
                    memory, store = store, open_store(self.plan.folder, codec=self.plan.codec)
                    move(memory, store)
                self._methods(name, store, layout, tokens, methods)
        for key in list(store.keys()):
            store.delete(key)

    def _methods(self, name: str, store: ChunkStore, layout: PromptLayout, tokens: int, methods: list[str]) -> None:
        blender, cold = Blender(self.decoder, store), name == "disk-cold"
        full = (self._row(tokens, ("", FULL)) or {}).get("ttft_s")
        held, rate = name, copy_rate(self.plan.device)
        if name != "memory":
            held = f"{file_system(self.plan.folder)}, {'cold' if cold else 'in the page cache'}"
            rate = min(read_rate(self.plan.folder, cold=cold), rate)
        for method in methods:
            config = METHODS[method]
            if self.plan.correction == "off":
                config = replace(config, correction=False)

            def prefill(config: BlendConfig = config) -> tuple[float, Row]:
                if cold and not drop_page_cache(self.plan.folder):
                    raise NotColdError
                blend = blender.prefill(layout, config=config)
                return blend.ttft_s, _about(blend)

            def figures(seconds: float, row: Row) -> Row:
                return {"held": held, **_against(full, seconds, row, rate, len(self.decoder.layers))}

            self._timed(tokens, (name, method), layout, prefill, figures)

    def _timed(
        self,
        tokens: int,
        names: tuple[str, str],
        layout: PromptLayout,
        prefill: Callable[[], tuple[float, Row]],
        figures: Callable[[float, Row], Row],
    ) -> None:
        """Warm up once, time the rounds, write the row. Nothing of one run is alive in the next."""
        say(f"{self.plan.shape}, {tokens} tokens, {', '.join(filter(None, names))}")
        cuda = self.plan.device.type == "cuda"
        try:
            _alone(prefill)
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.plan.device)
            runs = [_alone(prefill) for _ in range(self.plan.rounds)]
        except torch.OutOfMemoryError:
            self._skip(tokens, [names], "out of GPU memory")
        except NotColdError:
            self._skip(tokens, [names], "this file system does not forget files when it is asked to")
        else:
            seconds, row = [seconds for seconds, _ in runs], _merged([row for _, row in runs])
            row |= {"ttft_s": median(seconds), "all_s": seconds, "prompt": layout.rows, **figures(median(seconds), row)}
            row["peak_bytes"] = torch.cuda.max_memory_allocated(self.plan.device) if cuda else None
            row["when"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self.results.put("ttft", self.plan.key(tokens, *names), row)
        if cuda:
            torch.cuda.empty_cache()


def _alone(prefill: Callable[[], tuple[float, Row]]) -> tuple[float, Row]:
    """One run, after everything that an earlier one left is gone."""
    gc.collect()
    return prefill()


def _about(blend: Blend) -> Row:
    """The figures of one run, apart from its time."""
    wrong = [] if bool(blend.logits.isfinite().all()) else ["logits are not finite"]
    wrong += [] if all(blend.hits) else ["chunks were missing"]
    wrong += [*blend.problems, *blend.artifact_problems]
    found = {"rows_share": blend.rows_share, "bytes_loaded": blend.bytes_loaded, "stages": dict(blend.stages)}
    return {**found, "notes": list(blend.notes), "wrong": "; ".join(wrong) or None}


def _merged(rows: list[Row]) -> Row:
    """Several runs as one: of stages the median, of the rest the last."""
    last = dict(rows[-1])
    if "stages" in last:
        last["stages"] = {name: median(row["stages"].get(name, 0.0) for row in rows) for name in last["stages"]}
    return last


def _against(full: float | None, seconds: float, row: Mapping[str, Any], rate: float, layers: int) -> Row:
    """Speed-up over full prefill, and the time over the floor; nothing where full prefill has no time."""
    if full is None:
        return {"bandwidth": rate}
    floor = floor_seconds(row["rows_share"] * full, row["bytes_loaded"] / rate, layers)
    return {"bandwidth": rate, "speedup": full / seconds, "floor_s": floor, "over_floor": seconds / floor}


def table(rows: Iterable[Row]) -> list[str]:
    """Lines of a table; a row without a time says why."""
    head = f"{'shape':<10} {'tokens':>7} {'store':<10} {'method':<18} {'TTFT':>9} {'speed-up':>9} {'rows':>6}"
    stages = "".join(f" {name:>10}" for name in _STAGES)
    return [f"{head} {'floor':>9} {'x floor':>7}{stages} {'GPU peak':>9}", *map(_line, rows)]


def _line(row: Row) -> str:
    line = f"{row['shape']:<10} {row['tokens']:>7} {row['store'] or '-':<10} {row['method']:<18}"
    if "ttft_s" not in row:
        return f"{line} {row['why_not']}"
    peak = row["peak_bytes"]
    cells = [
        _ms(row["ttft_s"], 9),
        _cell(row.get("speedup"), ">8.1f", "x", 9),
        _cell(row.get("rows_share"), ">6.1%", "", 6),
    ]
    cells += [_ms(row.get("floor_s"), 9), _cell(row.get("over_floor"), ">7.2f", "", 7)]
    cells += [_ms(row.get("stages", {}).get(name), 10) for name in _STAGES]
    cells += [_cell(peak and peak / 2**30, ">5.1f", " GiB", 9)]
    notes = [*(row.get("notes") or ()), *([f"WRONG: {row['wrong']}"] if row.get("wrong") else ())]
    return "  ".join([" ".join([line, *cells]), *notes])


def _ms(seconds: float | None, width: int) -> str:
    return _cell(None if seconds is None else 1e3 * seconds, f">{width - 3}.0f", " ms", width)


def _cell(value: float | None, form: str, unit: str, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{form}}{unit}"
