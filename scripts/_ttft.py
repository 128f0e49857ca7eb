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

from _paths import documentation
from _results import Results, Row, markdown, say
from _shapes import SHAPES, random_decoder, random_ids, random_layout
from blend.chunks.fit import neutral_correction
from blend.chunks.surrogate import with_surrogate
from blend.config import BlendConfig, CorpusConfig
from blend.eval.evaluator import PLAIN_REUSE
from blend.model.decoder import FullPrefill, full_prefill
from blend.prefill.blender import Blender
from blend.serve.engine.decoding import HostCopy
from blend.stopwatch import Stopwatch
from blend.store import ChunkPool, open_store
from blend.types import CacheKind

if TYPE_CHECKING:
    from blend.layout import PromptLayout
    from blend.model.decoder import Decoder
    from blend.prompt_template import PromptTemplate

FULL = "full"
METHODS: dict[str, BlendConfig | None] = {
    FULL: None,
    "reuse": PLAIN_REUSE,
    "hkvd 5 %": BlendConfig(selector="hkvd", ratio=0.05),
    "hkvd 15 %": BlendConfig(selector="hkvd", ratio=0.15),
    "query_guided 5 %": BlendConfig(selector="query_guided", ratio=0.05),
    "query_guided 15 %": BlendConfig(selector="query_guided", ratio=0.15),
}
TOO_LARGE = "out of GPU memory"
ANSWERS = (1, 8)  # that are decoded at the same time
_STEPS = 24  # of decoding, of which the first third warms up
RANDOM = "; random weights: times, bytes and memory mean something, answers and which rows a selector finds do not"
QUESTION = "Which function parses an ISO 8601 string, and what does it raise when the string is malformed?"
SURROGATE_CHUNKS = 16
_STAGES = ("load", "reposition", "select", "recompute")
_SAMPLE = 256 << 20  # bytes that a bandwidth is measured on, at most


class Subject(NamedTuple):
    """A model and its prompts: `layout` of so many context tokens, and `surrogate_chunks` for the surrogate context."""

    decoder: Decoder
    layout: Callable[[int], PromptLayout]
    surrogate_chunks: Sequence[tuple[int, ...]]
    random: bool


def random_subject(shape: str, device: torch.device, dtype: torch.dtype, chunk_tokens: int) -> Subject:
    """A decoder of this shape with random weights, and prompts of random token ids."""
    vocabulary = SHAPES[shape].vocab_size
    decoder = random_decoder(shape, device, dtype)
    chunks = [random_ids(vocabulary, chunk_tokens, 100 + number) for number in range(SURROGATE_CHUNKS)]
    return Subject(decoder, lambda tokens: random_layout(vocabulary, tokens, chunk_tokens), chunks, random=True)


def documentation_prompts(
    template: PromptTemplate, longest: int, size: int
) -> tuple[Callable[[int], PromptLayout], list[tuple[int, ...]]]:
    """Prompts of up to `longest` context tokens of Python's documentation in chunks of `size`, and other chunks of it."""
    ids = template.encode("\n\n".join(document.text for document in documentation()))
    end = longest + SURROGATE_CHUNKS * size
    if len(ids) < end:
        raise SystemExit(f"the corpus has {len(ids)} tokens; choose shorter --lengths")

    def layout(tokens: int) -> PromptLayout:
        starts = range(0, tokens, size)
        return template.layout_of_ids(QUESTION, [tuple(ids[at : min(at + size, tokens)]) for at in starts])

    return layout, [tuple(ids[at : at + size]) for at in range(longest, end, size)]


@dataclass
class Bench:
    """Measures what `results` lack.

    Args:
        load: Makes the subject, when it is needed.
        about: What every row says.
        results: The rows.
        rounds: Turns of each method.
        codec: Of the stored caches.
        folder: Where a disk store is made, for the time of its rows. None: among the system's temporary files.
    """

    load: Callable[[], Subject]
    about: Mapping[str, object]
    results: Results
    rounds: int
    codec: str = "bfloat16"
    folder: Path | None = None

    @cached_property
    def subject(self) -> Subject:
        """The model and its prompts."""
        return self.load()

    def run(self, lengths: Iterable[int], stores: Iterable[str]) -> list[Row]:
        """The rows of these lengths and stores, measured now or before."""
        rows = []
        for tokens, name in itertools.product(lengths, stores):
            keys = [{**self.about, "tokens": tokens, "store": name, "method": method} for method in METHODS]
            if not all(self.results.find("ttft", key) for key in keys):
                say(f"{tokens} tokens, {name}")
                measured = self._measured(tokens, name)
                for key, method in zip(keys, METHODS, strict=True):
                    self.results.put("ttft", key, measured.get(method, {"why_not": TOO_LARGE}))
            rows += [row for key in keys if (row := self.results.find("ttft", key))]
        return rows

    def _measured(self, tokens: int, name: str) -> dict[str, Row]:
        """The rows of the methods that fit the memory."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            place = folder if name == "disk" else f"{name}:"
            try:
                layout = self.subject.layout(tokens)
                blender = filled_blender(self.subject, layout, place, self.codec)
                runs = self._take_turns(blender, layout)
                if blender.decoder.device.type == "cuda":
                    self._decode(blender, layout, {"tokens": tokens, "store": name})
            except torch.OutOfMemoryError:
                return {}
            rate = copy_rate(blender.decoder.device)
            if name == "disk":
                rate = min(rate, read_rate(Path(folder)))
        full = [row["ttft_s"] for row in runs.get(FULL, ())]
        return {method: _merged(rows, full, rate, len(blender.decoder.rotations)) for method, rows in runs.items()}

    def _take_turns(self, blender: Blender, layout: PromptLayout) -> dict[str, list[Row]]:
        """Warm up once, then let the methods that fit the memory take turns. Nothing of one run is alive in the next."""
        runs: dict[str, list[Row]] = {method: [] for method in METHODS}
        for _ in range(self.rounds + 1):
            for method in list(runs):
                gc.collect()
                try:
                    runs[method].append(run_once(blender, layout, METHODS[method]))
                except torch.OutOfMemoryError:  # the others may fit
                    del runs[method]
            _settle(blender)
        return {method: rows[1:] for method, rows in runs.items()}

    def _decode(self, blender: Blender, layout: PromptLayout, key: Mapping[str, object]) -> None:
        """Seconds of a decoding step behind blended prompts."""
        for answers in ANSWERS:
            row = dict[str, object]()
            try:
                row["step_s"] = step_seconds(blender, layout, answers, late=False)
                row["late_s"] = step_seconds(blender, layout, answers, late=True)
            except torch.OutOfMemoryError:
                row["why_not"] = TOO_LARGE
            self.results.put("decoding", {**self.about, **key, "method": "reuse", "answers": answers}, row)


def filled_blender(subject: Subject, layout: PromptLayout, place: str, codec: str = "bfloat16") -> Blender:
    """A store with the caches of the prompt's chunks, a surrogate context, and a KV correction.

    place: a folder, "memory:" for the host's memory alone, or "gpu:" for copies on the GPU as well.
    """
    pool = {"memory:": ChunkPool(gpu_budget_bytes=0), "gpu:": ChunkPool()}.get(place)
    store = open_store("memory:" if pool else place, codec=codec, memory_bytes=pool)
    blender = Blender(subject.decoder, store)
    library = blender.library(layout.kept_behind)
    library = with_surrogate(library, subject.surrogate_chunks, CorpusConfig().surrogate_tokens)
    library.compute(library.missing(layout.chunks))
    if not subject.random:
        blender.calibrate(layout.prefix, layout.chunks)
        return blender
    content = neutral_correction(subject.decoder.rotations).to_bytes()
    for kind in CacheKind:
        store.write_artifact(library.encoder(kind).identity.correction_name, content)
    return blender


def _settle(blender: Blender) -> None:
    """Copy chunks to the GPU and capture graphs, as a server does while it is idle."""
    pool = blender.store.pool
    if pool is not None and pool.gpu is not None:
        pool.gpu.settle()
    graphs = blender.decoder.graphs
    while graphs is not None and graphs.capture_next():
        pass


def run_once(blender: Blender, layout: PromptLayout, config: BlendConfig | None) -> Row:
    """One prefill, without what it made."""
    device = blender.decoder.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    prefill = full_prefill(blender.decoder, layout) if config is None else blender.prefill(layout, config=config)
    wrong = [] if prefill.logits.isfinite().all() else ["logits are not finite"]
    row = {"ttft_s": prefill.ttft_s, "prompt": layout.rows, "stages": {}, "notes": []}
    if not isinstance(prefill, FullPrefill):
        row |= {"rows_share": prefill.rows_share, "bytes_loaded": prefill.bytes_loaded}
        row |= {"stages": dict(prefill.stages), "notes": list(prefill.notes)}
        wrong += [*prefill.problems, *prefill.artifact_problems]
        if not all(prefill.hits):
            wrong.append("chunks were missing")
    peak_bytes = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return {**row, "wrong": "; ".join(wrong) or None, "peak_bytes": peak_bytes}


@torch.inference_mode()
def step_seconds(blender: Blender, layout: PromptLayout, answers: int, *, late: bool) -> float:
    """Seconds of one greedy decoding step of so many answers behind this prompt, median.

    late: the host reads the tokens of a step while the next one runs, as `generate` and the server do; else before it.
    """
    decoder = blender.decoder
    blends = [blender.prefill(layout, config=METHODS["reuse"]) for _ in range(answers)]
    tokens = [blend.logits.argmax(-1, keepdim=True) for blend in blends]
    seconds = []
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


def _merged(runs: Sequence[Row], full: Sequence[float], rate: float, layers: int) -> Row:
    """Several runs as one row: medians of times, the median of the turns' speed-ups, of the rest the last."""
    times = [row["ttft_s"] for row in runs]
    row = {**runs[-1], "ttft_s": median(times), "all_s": times, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    row["stages"] = {name: median(run["stages"].get(name, 0.0) for run in runs) for name in row["stages"]}
    if not full:
        return row
    row["speedup"] = median(full_s / own_s for full_s, own_s in zip(full, times, strict=True))
    if "rows_share" in row:
        computing_s = row["rows_share"] * median(full)
        loading_s = row["bytes_loaded"] / rate
        floor = floor_seconds(computing_s, loading_s, layers)
        row |= {"bandwidth": rate, "floor_s": floor, "over_floor": row["ttft_s"] / floor}
    return row


def floor_seconds(compute_s: float, load_s: float, layers: int) -> float:
    """The least time of a blended prefill: its share of compute, the first layer's load, and what compute cannot hide."""
    return compute_s + max(load_s / layers, load_s - compute_s)


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a copy from memory to `device`, for a GPU from page-locked memory, median of five."""
    source = torch.ones(_SAMPLE, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(_SAMPLE, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(5):
        watch = Stopwatch(device)
        target.copy_(source)
        seconds.append(watch.total())
    return _SAMPLE / median(seconds)


def read_rate(folder: Path) -> float:
    """Bytes a second of reading a store's files one after another."""
    buffer = bytearray(16 << 20)
    total = 0
    watch = Stopwatch()
    for path in sorted(path for path in (folder / "objects").rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while total < _SAMPLE and (count := file.readinto(buffer)):
                total += count
    return total / watch.total()


def table(rows: Iterable[Row]) -> Iterator[str]:
    """A table in Markdown; a row without a time says why."""
    figures = f"TTFT | speed-up | rows | floor | x floor | {' | '.join(_STAGES)} | GPU peak | notes"
    return markdown(f"model | tokens | store | method | {figures}", map(_cells, rows), names=4)


def _cells(row: Row) -> list[object]:
    names = [row["shape"], row["tokens"], row["store"], row["method"]]
    if "ttft_s" not in row:
        return [*names, row["why_not"]]
    share, over, peak = (row.get(name) for name in ("rows_share", "over_floor", "peak_bytes"))
    cells = [_ms(row["ttft_s"]), f"{row['speedup']:.1f}x", share and f"{share:.1%}", _ms(row.get("floor_s"))]
    cells += [over and f"{over:.2f}", *(_ms(row["stages"].get(name)) for name in _STAGES)]
    notes = [*row["notes"], *([f"WRONG: {row['wrong']}"] if row["wrong"] else [])]
    return [*names, *cells, peak and f"{peak / 2**30:.1f} GiB", "; ".join(notes)]


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:.0f} ms"
