"""What a row of the TTFT benchmark says of a method, and the table that shows the rows."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from _results import Results, Row
from _shapes import SHAPES, STORES, random_decoder, random_ids, random_layout, why_not
from _stores import copy_rate, drop_page_cache, file_system, fill, lacks_room, move, read_rate
from blend.blender import Blender
from blend.config import BlendConfig
from blend.eval.evaluator import PLAIN_REUSE
from blend.model.decoder import full_prefill
from blend.store import ChunkStore, open_store
from blend.store.disk import DiskBackend

if TYPE_CHECKING:
    from blend.blender import Blend
    from blend.model.decoder import Decoder
    from blend.types import PromptLayout


_STAGES = ("load", "reposition", "select", "recompute")


def about(blend: Blend) -> Row:
    """What a row says of one run, the time apart."""
    wrong = [] if bool(blend.logits.isfinite().all()) else ["logits are not finite"]
    wrong += [] if all(blend.hits) else ["chunks were missing"]
    wrong += [*blend.problems, *blend.artifact_problems]
    return {
        "rows_share": blend.rows_share,
        "bytes_loaded": blend.bytes_loaded,
        "stages": dict(blend.stages),
        "notes": list(blend.notes),
        "wrong": "; ".join(wrong) or None,
    }


def merged(rows: list[Row]) -> Row:
    """What several runs say: of stages the median, of the rest the last."""
    last = dict(rows[-1])
    if "stages" in last:
        last["stages"] = {name: median(row["stages"].get(name, 0.0) for row in rows) for name in last["stages"]}
    return last


def against(full: float | None, seconds: float, row: Mapping[str, Any], rate: float, layers: int) -> Row:
    """Speed-up over full prefill, and what is above the floor; nothing where full prefill has no time."""
    from blend.eval.evaluator import floor_seconds

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
    speedup, share = _cell(row.get("speedup"), ">8.1f", "x", 9), _cell(row.get("rows_share"), ">6.1%", "", 6)
    line += f" {_ms(row['ttft_s'], 9)} {speedup} {share}"
    line += f" {_ms(row.get('floor_s'), 9)} {_cell(row.get('over_floor'), '>7.2f', '', 7)}"
    line += "".join(f" {_ms(row.get('stages', {}).get(name), 10)}" for name in _STAGES)
    peak = row["peak_bytes"]
    line += f" {_cell(peak and peak / 2**30, '>5.1f', ' GiB', 9)}"
    return "  ".join((line, *(row.get("notes") or ()), *([f"WRONG: {row['wrong']}"] if row.get("wrong") else ())))


def _ms(seconds: float | None, width: int) -> str:
    return _cell(None if seconds is None else 1e3 * seconds, f">{width - 3}.0f", " ms", width)


def _cell(value: float | None, form: str, unit: str, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{form}}{unit}"


# --- Time to first token of one shape with random weights: methods and stores, each row written as soon as it is measured.


METHODS = {
    "reuse": PLAIN_REUSE,
    "query_guided 5 %": BlendConfig(selector="query_guided", ratio=0.05),
    "query_guided 15 %": BlendConfig(selector="query_guided", ratio=0.15),
    "hkvd 15 %": BlendConfig(selector="hkvd", ratio=0.15),
}
FULL = "full"
RANDOM = "random weights: times, bytes and memory mean something, answers and which rows a selector finds do not"


@dataclass(frozen=True)
class Plan:
    """What is measured at one shape. device, dtype: as torch names them. folder: where the disk store is made."""

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
        return {
            "shape": self.shape,
            "tokens": tokens,
            "store": store,
            "method": method,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "chunk_tokens": self.chunk_tokens,
            "codec": self.codec,
            "correction": self.correction,
        }

    def rows(self, tokens: int) -> list[tuple[str, str]]:
        """Store and method of every row at this length; full prefill has no store."""
        return [("", FULL), *((store, method) for store in self.stores for method in METHODS)]


class Bench:
    """Measures a plan into `results`; with `resume` the rows that are there stay as they are."""

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
            if self._lacking(tokens):
                self._measure(tokens)
            keys = [self.plan.key(tokens, *names) for names in self.plan.rows(tokens)]
            found += [row for key in keys if (row := self.results.find("ttft", key))]
        return found

    def _lacking(self, tokens: int) -> list[tuple[str, str]]:
        """The rows that are to be measured."""
        held = [self.results.find("ttft", self.plan.key(tokens, *names)) for names in self.plan.rows(tokens)]
        pairs = zip(self.plan.rows(tokens), held, strict=True)
        return [names for names, row in pairs if not (self.resume and row)]

    def _measure(self, tokens: int) -> None:
        lacking, plan = self._lacking(tokens), self.plan
        reason = None if "decoder" in self.__dict__ else why_not(plan.shape, tokens, plan.device, plan.dtype)
        if reason:
            self._skip(tokens, lacking, reason)
            return
        layout = random_layout(SHAPES[plan.shape].vocab_size, tokens, plan.chunk_tokens)
        if ("", FULL) in lacking:
            self._full(layout, tokens)
        lacking = self._lacking(tokens) if self.resume else [names for names in lacking if names[0]]
        if any(store for store, _ in lacking):
            self._stored(layout, tokens, lacking)

    def _skip(self, tokens: int, rows: Iterable[tuple[str, str]], reason: str) -> None:
        """Say in the rows why they have no figures."""
        say(f"{self.plan.shape}, {tokens} tokens: {reason}")
        for names in rows:
            self.results.put("ttft", self.plan.key(tokens, *names), {"why_not": reason})

    def _full(self, layout: PromptLayout, tokens: int) -> None:
        def prefill() -> tuple[float, Row]:
            done = full_prefill(self.decoder, layout)
            return done.ttft_s, {"wrong": None if bool(done.logits.isfinite().all()) else "logits are not finite"}

        self._row(tokens, ("", FULL), layout, prefill, lambda seconds, row: {"speedup": 1.0})

    def _stored(self, layout: PromptLayout, tokens: int, lacking: list[tuple[str, str]]) -> None:
        """Fill a store in memory, then measure store after store, each emptied into the next."""
        vocabulary, size = SHAPES[self.plan.shape].vocab_size, self.plan.chunk_tokens
        others = [random_ids(vocabulary, size, 100 + number) for number in range(16)]
        store = open_store("memory:", codec=self.plan.codec)
        fill(self.decoder, store, layout, others, self.plan.correction)
        for name in STORES:
            methods = [method for wanted, method in lacking if wanted == name]
            if not methods:
                continue
            reason = lacks_room(self.plan.folder, store.stats().nbytes) if name == "disk" else None
            if reason:
                self._skip(tokens, [(name, method) for method in methods], reason)
                continue
            store = self._moved(store, name)
            self._methods(Place.of(name, self.plan), store, layout, tokens, methods)
        if isinstance(store.backend, DiskBackend):
            _empty(store)

    def _moved(self, store: ChunkStore, name: str) -> ChunkStore:
        """The store that rows of this name are measured with, holding everything that `store` did."""
        if name == "memory" or isinstance(store.backend, DiskBackend):
            return store
        target = open_store(self.plan.folder, codec=self.plan.codec)
        move(store, target)
        return target

    def _methods(
        self, place: Place, store: ChunkStore, layout: PromptLayout, tokens: int, methods: Iterable[str]
    ) -> None:
        blender = Blender(self.decoder, store)
        full = (self.results.find("ttft", self.plan.key(tokens, "", FULL)) or {}).get("ttft_s")
        for method in methods:
            config = METHODS[method]
            if self.plan.correction == "off":
                config = replace(config, correction=False)

            def prefill(config: BlendConfig = config) -> tuple[float, Row]:
                if place.cold and not drop_page_cache(self.plan.folder):
                    raise NotColdError
                blend = blender.prefill(layout, config=config)
                return blend.ttft_s, about(blend)

            def figures(seconds: float, row: Row) -> Row:
                return {"held": place.held, **against(full, seconds, row, place.rate, len(self.decoder.layers))}

            self._row(tokens, (place.name, method), layout, prefill, figures)

    def _row(
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
            seconds, row = [seconds for seconds, _ in runs], merged([row for _, row in runs])
            row |= {"ttft_s": median(seconds), "all_s": seconds, "prompt": layout.rows, **figures(median(seconds), row)}
            row["peak_bytes"] = torch.cuda.max_memory_allocated(self.plan.device) if cuda else None
            row["when"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self.results.put("ttft", self.plan.key(tokens, *names), row)
        if cuda:
            torch.cuda.empty_cache()


class NotColdError(Exception):
    """The page cache still holds what it was asked to forget."""


@dataclass(frozen=True)
class Place:
    """Where the caches lie. held: in words. rate: bytes a second at which they can come to the device."""

    name: str
    held: str
    rate: float
    cold: bool

    @classmethod
    def of(cls, name: str, plan: Plan) -> Place:
        """By measuring it, for the store `name`."""
        if name == "memory":
            return cls(name, name, copy_rate(plan.device), False)
        cold = name == "disk-cold"
        rate = min(read_rate(plan.folder, cold=cold), copy_rate(plan.device))
        return cls(name, f"{file_system(plan.folder)}, {'cold' if cold else 'in the page cache'}", rate, cold)


def _alone(prefill: Callable[[], tuple[float, Row]]) -> tuple[float, Row]:
    """One run, after everything that an earlier one left is gone."""
    gc.collect()
    return prefill()


def _empty(store: ChunkStore) -> None:
    for key in list(store.keys()):
        store.delete(key)


def say(line: str) -> None:
    """To whoever waits; results go to standard output."""
    print(line, file=sys.stderr, flush=True)
