"""Time to first token of one model: full prefill and blended methods in turns, over one prompt, for each store."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from _results import Results, Row, markdown, say
from blend.chunks.fit import neutral_correction
from blend.chunks.surrogate import with_surrogate
from blend.config import BlendConfig, CorpusConfig
from blend.eval.evaluator import PLAIN_REUSE, floor_seconds
from blend.model.decoder import FullPrefill, full_prefill
from blend.model.fused import FusedModules
from blend.model.host_copy import HostCopy
from blend.prefill.blender import Blend, Blender
from blend.store import ChunkPool, open_store
from blend.types import CacheKind, Stopwatch

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.prompt import PromptTemplate
    from blend.types import PromptLayout

FULL = "full"
METHODS: dict[str, BlendConfig | None] = {
    FULL: None,
    "reuse": PLAIN_REUSE,
    "hkvd 5 %": BlendConfig(selector="hkvd", ratio=0.05),
    "hkvd 15 %": BlendConfig(selector="hkvd", ratio=0.15),
    "query_guided 5 %": BlendConfig(selector="query_guided", ratio=0.05),
    "query_guided 15 %": BlendConfig(selector="query_guided", ratio=0.15),
}
OWN_MODULES = "query_guided 15 %, own modules"  # without kernels in place of small modules; on a GPU
STORES = ("memory", "gpu", "disk")  # a disk store is read out of the page cache
TOO_LARGE = "out of GPU memory"
ANSWERS = (1, 8)  # that are decoded at the same time
_STEPS = 24  # of decoding, of which the first third warms up
RANDOM = "random weights: times, bytes and memory mean something, answers and which rows a selector finds do not"
QUESTION = "Which function parses an ISO 8601 string, and what does it raise when the string is malformed?"
OTHERS = 16  # chunks of which the surrogate context is chosen
_STAGES = ("load", "reposition", "select", "recompute")
_SAMPLE = 256 << 20  # bytes that a bandwidth is measured on, at most


class Subject(NamedTuple):
    """A model and its prompts.

    layout: a prompt of so many context tokens. others: chunks for the surrogate context. random: whether the weights are, which
    leaves a KV correction nothing to predict.
    """

    decoder: Decoder
    layout: Callable[[int], PromptLayout]
    others: Sequence[tuple[int, ...]]
    random: bool


def documentation_prompts(
    template: PromptTemplate, longest: int, size: int
) -> tuple[Callable[[int], PromptLayout], list[tuple[int, ...]]]:
    """Prompts of up to `longest` context tokens of Python's documentation in chunks of `size`, and other chunks of it.

    Raises SystemExit when the documentation has fewer tokens.
    """
    from blend_retrieval import load_documents, write_stdlib_corpus

    with tempfile.TemporaryDirectory() as folder:
        write_stdlib_corpus(Path(folder))
        ids = template.encode("\n\n".join(document.text for document in load_documents([folder]).documents))
    if len(ids) < longest + OTHERS * size:
        raise SystemExit(f"the corpus has {len(ids)} tokens; choose shorter --lengths")

    def layout(tokens: int) -> PromptLayout:
        starts = range(0, tokens, size)
        return template.layout_of_ids(QUESTION, [tuple(ids[at : min(at + size, tokens)]) for at in starts])

    return layout, [tuple(ids[at : at + size]) for at in range(longest, longest + OTHERS * size, size)]


@dataclass
class Bench:
    """Measures into `results` what they do not hold.

    load: makes the subject, when the first missing row needs it. about: what every row says besides tokens, store and method.
    """

    load: Callable[[], Subject]
    about: Mapping[str, object]
    results: Results
    codec: str
    rounds: int
    folder: Path | None = None

    @property
    def methods(self) -> dict[str, BlendConfig | None]:
        """What is measured, by name."""
        on_gpu = self.about.get("device") == "cuda"
        return METHODS | ({OWN_MODULES: METHODS["query_guided 15 %"]} if on_gpu else {})

    @cached_property
    def subject(self) -> Subject:
        """The model and its prompts."""
        return self.load()

    def run(self, lengths: Iterable[int], stores: Iterable[str]) -> list[Row]:
        """The rows of these lengths and stores, measured now or before."""
        found = []
        for tokens, name in itertools.product(lengths, stores):
            keys = [self._key(tokens, name, method) for method in self.methods]
            if not all(self.results.find("ttft", key) for key in keys):
                with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                    self._measure(tokens, name, folder if name == "disk" else f"{name}:")
            found += [row for key in keys if (row := self.results.find("ttft", key))]
        return found

    def _key(self, tokens: int, store: str, method: str) -> dict[str, object]:
        return {**self.about, "codec": self.codec, "tokens": tokens, "store": store, "method": method}

    def _measure(self, tokens: int, name: str, place: str) -> None:
        say(f"{tokens} tokens, {name}")
        rows: dict[str, Row]
        try:
            rows = self._rows(tokens, name, place)
        except torch.OutOfMemoryError:
            rows = {method: {"why_not": TOO_LARGE} for method in self.methods}
        for method, row in rows.items():
            self.results.put("ttft", self._key(tokens, name, method), row)

    def _rows(self, tokens: int, name: str, place: str) -> dict[str, Row]:
        """Warm up once, then let the methods take turns. Nothing of one run is alive in the next."""
        decoder, layout = self.subject.decoder, self.subject.layout(tokens)
        blender = self.filled(place, layout)
        rate = copy_rate(decoder.device)
        if name == "disk":
            rate = min(rate, read_rate(Path(place)))
        runs: dict[str, list[Row]] = {method: [] for method in self.methods}
        too_large = set[str]()
        for turn in range(self.rounds + 1):
            for method, config in self.methods.items():
                if method in too_large:
                    continue
                gc.collect()
                fused = decoder.fused
                decoder.fused = FusedModules() if method == OWN_MODULES else fused
                try:
                    row = _run(blender, layout, config)
                except torch.OutOfMemoryError:  # the others may fit
                    too_large.add(method)
                    continue
                finally:
                    decoder.fused = fused
                if turn:
                    runs[method].append(row)
            if (pool := blender.store.pool) is not None and pool.gpu is not None:
                pool.gpu.settle()
            while decoder.graphs is not None and decoder.graphs.capture_next():
                continue  # as a server does while it is idle
            say(f"  round {turn} of {self.rounds}")
        if decoder.device.type == "cuda":
            self._decode(blender, layout, self._key(tokens, name, ""))
        full = [] if FULL in too_large else [row["ttft_s"] for row in runs[FULL]]
        return {
            method: {"why_not": TOO_LARGE}
            if method in too_large
            else _merged(found, full, rate, len(decoder.rotations))
            for method, found in runs.items()
        }

    def _decode(self, blender: Blender, layout: PromptLayout, key: Mapping[str, object]) -> None:
        """Seconds of a decoding step behind blended prompts."""
        for answers in ANSWERS:
            row = dict[str, object]()
            try:
                row["step_s"] = step_seconds(blender, layout, answers, late=False)
                row["late_s"] = step_seconds(blender, layout, answers, late=True)
            except torch.OutOfMemoryError:
                row["why_not"] = TOO_LARGE
            self.results.put("decoding", {**key, "method": "reuse", "answers": answers}, row)
            say(f"  decoding {answers}: {row}")

    def filled(self, place: str, layout: PromptLayout) -> Blender:
        """A store with the caches of the prompt's chunks, a surrogate context, and a KV correction.

        place: a folder, "memory:" for the host's memory alone, or "gpu:" for copies on the GPU as well.
        """
        pool = {"memory:": ChunkPool(gpu_budget_bytes=0), "gpu:": ChunkPool()}.get(place)
        location = "memory:" if pool else place
        blender = Blender(self.subject.decoder, open_store(location, codec=self.codec, memory_bytes=pool))
        library = with_surrogate(
            blender.library(layout.kept_behind), self.subject.others, CorpusConfig().surrogate_tokens
        )
        library.compute(library.missing(layout.chunks))
        if not self.subject.random:
            blender.calibrate(layout.prefix, layout.chunks)
            return blender
        content = neutral_correction(self.subject.decoder.rotations).to_bytes()
        for kind in CacheKind:
            name = library.encoder(kind).identity.correction_name
            blender.store.write_artifact(name, content)
        return blender


def _run(blender: Blender, layout: PromptLayout, config: BlendConfig | None) -> Row:
    """One prefill, without what it made."""
    device = blender.decoder.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    prefill = full_prefill(blender.decoder, layout) if config is None else blender.prefill(layout, config=config)
    wrong = [] if bool(prefill.logits.isfinite().all()) else ["logits are not finite"]
    row = {"ttft_s": prefill.ttft_s, "prompt": layout.rows, "stages": {}, "notes": []}
    if not isinstance(prefill, FullPrefill):
        row |= _about(prefill)
        wrong += [*prefill.problems, *prefill.artifact_problems]
        wrong += [] if all(prefill.hits) else ["chunks were missing"]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {**row, "wrong": "; ".join(wrong) or None, "peak_bytes": peak}


@torch.inference_mode()
def step_seconds(blender: Blender, layout: PromptLayout, answers: int, *, late: bool) -> float:
    """Seconds of one greedy decoding step of so many answers behind this prompt, median.

    late: the host reads the tokens of a step while the next one runs, as `generate` and the server do; else before it.
    """
    decoder = blender.decoder
    blends = [blender.prefill(layout, config=METHODS["reuse"]) for _ in range(answers)]
    tokens, seconds = [blend.logits.argmax(-1, keepdim=True) for blend in blends], []
    unread = HostCopy(torch.cat(tokens))
    for _ in range(_STEPS):
        begin = time.perf_counter()
        logits = decoder.decode(tokens, [blend.cache for blend in blends])
        tokens = list(logits.argmax(-1)[:, None, None])
        copy = HostCopy(torch.cat(tokens))
        (unread if late else copy).read()
        unread = copy
        seconds.append(time.perf_counter() - begin)
    return median(seconds[_STEPS // 3 :])


def _about(blend: Blend) -> Row:
    found = {"rows_share": blend.rows_share, "bytes_loaded": blend.bytes_loaded}
    return {**found, "stages": dict(blend.stages), "notes": list(blend.notes)}


def _merged(runs: Sequence[Row], full: Sequence[float], rate: float, layers: int) -> Row:
    """Several runs as one row: medians of times, the median of the turns' speed-ups, of the rest the last."""
    times = [row["ttft_s"] for row in runs]
    row = {**runs[-1], "ttft_s": median(times), "all_s": times, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    row["stages"] = {name: median(one["stages"].get(name, 0.0) for one in runs) for name in row["stages"]}
    if not full:
        return row
    row["speedup"] = median(theirs / mine for theirs, mine in zip(full, times, strict=True))
    if "rows_share" in row:
        floor = floor_seconds(row["rows_share"] * median(full), row["bytes_loaded"] / rate, layers)
        row |= {"bandwidth": rate, "floor_s": floor, "over_floor": row["ttft_s"] / floor}
    return row


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a copy from memory to `device`, for a GPU from page-locked memory, median of five."""
    size = _SAMPLE if device.type == "cuda" else _SAMPLE // 4
    source = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target, seconds = torch.empty(size, dtype=torch.uint8, device=device), []
    for _ in range(5):
        watch = Stopwatch(device)
        target.copy_(source)
        seconds.append(watch.total())
    return size / median(seconds)


def read_rate(folder: Path) -> float:
    """Bytes a second of reading a store's files one after another."""
    buffer, done = bytearray(16 << 20), 0
    watch = Stopwatch()
    for path in sorted(path for path in (folder / "objects").rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while done < _SAMPLE and (count := file.readinto(buffer)):
                done += count
    return done / watch.total()


def table(rows: Iterable[Row]) -> Iterator[str]:
    """A table in Markdown; a row without a time says why."""
    figures = f"TTFT | speed-up | rows | floor | x floor | {' | '.join(_STAGES)} | GPU peak | notes"
    return markdown(f"model | tokens | store | method | {figures}", map(_cells, rows), names=4)


def _cells(row: Row) -> list[object]:
    names = [row["shape"], row["tokens"], row["store"], row["method"]]
    if "ttft_s" not in row:
        return [*names, row["why_not"]]
    share, over, peak = row.get("rows_share"), row.get("over_floor"), row["peak_bytes"]
    cells = [_ms(row["ttft_s"]), f"{row['speedup']:.1f}x", share and f"{share:.1%}", _ms(row.get("floor_s"))]
    cells += [over and f"{over:.2f}", *(_ms(row["stages"].get(name)) for name in _STAGES)]
    wrong = [f"WRONG: {row['wrong']}"] if row["wrong"] else []
    return [*names, *cells, peak and f"{peak / 2**30:.1f} GiB", "; ".join([*row["notes"], *wrong])]


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:.0f} ms"
