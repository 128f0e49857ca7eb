"""Measure methods in turns, in one process and on the same token ids, and compare them with full recompute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

import torch

from blend.chunks.surrogate import with_surrogate
from blend.compare import Reference
from blend.config import REPORT_TOKENS, BlendConfig
from blend.eval.dataset import Record
from blend.eval.metrics import exact_match, names_one, rouge_l, value_recall, word_f1
from blend.eval.report import BLEND, Measurement
from blend.model.decoder import FullPrefill, full_prefill
from blend.model.generate import generate
from blend.prefill.blender import Blend, Blender
from blend.prompt import PromptTemplate
from blend.types import Progress, PromptLayout, Stopwatch, no_progress

if TYPE_CHECKING:
    from blend.model.decoder import Decoder


Prefilled = FullPrefill | Blend
FULL = "full"
_COPIED_BYTES = 64 << 20
PLAIN_REUSE = BlendConfig(selector="none", correction=False, surrogate=False)


@dataclass(frozen=True)
class Method:
    """A way to prefill under the name it has in the report; config None is the model's own full prefill."""

    name: str
    config: BlendConfig | None = None


def standard_methods(config: BlendConfig) -> tuple[Method, ...]:
    """Full recompute, plain reuse, and blended prefill as configured."""
    return (Method(FULL), Method("reuse", PLAIN_REUSE), Method(BLEND, config))


class Evaluator:
    """Measures methods on records.

    Args:
        blender: Blends the prompts, and knows the decoder.
        template: Lays out the prompts.
        max_new_tokens: Longest answer.
        repeats: Timed prefills of each method and record, of which the median counts.

    """

    def __init__(
        self, blender: Blender, template: PromptTemplate, *, max_new_tokens: int = REPORT_TOKENS, repeats: int = 1
    ) -> None:
        self.blender = blender
        self.decoder: Decoder = blender.decoder
        self.template = template
        self.max_new_tokens = max_new_tokens
        self.repeats = repeats

    @cached_property
    def _bandwidth(self) -> float:
        return copy_bandwidth(self.decoder.device)

    def measure(self, record: Record, methods: Sequence[Method]) -> list[Measurement]:
        """One measurement a method. The first method must be full recompute: the others are compared with it.

        All chunks are cached beforehand. Raises `PromptError` when the record's prompt does not fit the model.
        """
        layout = self.template.layout(record.question, record.chunks)
        self.decoder.check_length(layout.rows + self.max_new_tokens)
        self.cache_chunks(layout)
        prefills = self._prefills(layout, methods)
        times = {name: median(run.ttft_s for run in runs) for name, runs in prefills.items()}
        full = prefills[methods[0].name][-1]
        assert isinstance(full, FullPrefill)
        reference = Reference.of(full, layout, self.max_new_tokens)
        rows = []
        for method in methods:
            prefilled = prefills[method.name][-1]
            fidelity: dict[str, float | None] = {}
            if isinstance(prefilled, FullPrefill):
                answer = reference.answer.text
            else:
                fidelity = reference.fidelity(prefilled)._asdict()
                prefilled.rewind()
                answer = generate(self.decoder, prefilled, layout.token_ids, max_new_tokens=self.max_new_tokens).text
            rows.append(
                Measurement(
                    method=method.name,
                    record_id=record.id,
                    answer=answer,
                    ttft_s=times[method.name],
                    stages={} if isinstance(prefilled, FullPrefill) else prefilled.stages,
                    rows_total=layout.rows,
                    rows_computed=layout.rows * (1 if isinstance(prefilled, FullPrefill) else prefilled.rows_share),
                    floor_s=self._floor_s(prefilled, times),
                    f1=word_f1(answer, record.answers),
                    em=exact_match(answer, record.answers),
                    rouge_l=rouge_l(answer, record.answers),
                    recall=value_recall(answer, record.all_values),
                    right=names_one(answer, record.answers),
                    task=record.task,
                    **fidelity,
                )
            )
        return rows

    def calibrate(
        self,
        records: Sequence[Record],
        surrogate_tokens: int,
        progress: Progress = no_progress,
    ) -> bool:
        """Choose a surrogate context and measure the KV corrections on the chunks of these records, where the store holds none.

        Its prompts are chunks in random order, never a record's own prompt.

        Args:
            records: The records.
            surrogate_tokens: Length of the surrogate context; 0 chooses none.
            progress: Called with the stage "calibrate".

        Returns:
            Whether there is a KV correction now.

        """
        texts = [chunk for record in records for chunk in record.chunks]
        chunks = list(dict.fromkeys(map(self.template.chunk_ids, texts)))
        library = self.blender.library(self.template.prefix)
        if surrogate_tokens and not library.decided:
            with_surrogate(library, chunks, surrogate_tokens)
        return self.blender.calibrate(self.template.prefix, chunks, progress=progress)

    def warm_up(self, record: Record, methods: Sequence[Method]) -> None:
        """Run every method once, uncounted: first calls pay for allocation and kernel choice."""
        layout = self.template.layout(record.question, record.chunks)
        self.decoder.check_length(layout.rows)
        self.cache_chunks(layout)
        for method in methods:
            self._prefill(layout, method)

    def cache_chunks(self, layout: PromptLayout) -> None:
        """Compute and store the caches of the prompt's chunks that are missing."""
        library = self.blender.library(layout.kept_behind)
        library.compute(library.missing(layout.chunks))

    def _prefills(self, layout: PromptLayout, methods: Sequence[Method]) -> dict[str, list[Prefilled]]:
        """Alternating timed prefills; only the last of each method keeps its cache."""
        runs: dict[str, list[Prefilled]] = {method.name: [] for method in methods}
        for _ in range(self.repeats):
            for method in methods:
                runs[method.name].append(self._prefill(layout, method))
        return runs

    def _prefill(self, layout: PromptLayout, method: Method) -> Prefilled:
        if method.config is None:
            return full_prefill(self.decoder, layout)
        return self.blender.prefill(layout, config=method.config, room=self.max_new_tokens)

    def _floor_s(self, prefilled: Prefilled, times: Mapping[str, float]) -> float | None:
        if isinstance(prefilled, FullPrefill) or FULL not in times:
            return None
        load_s = prefilled.bytes_loaded / self._bandwidth
        return floor_seconds(prefilled.rows_share * times[FULL], load_s, len(self.decoder.rotations))


def floor_seconds(compute_s: float, load_s: float, layers: int) -> float:
    """The least time a blended prefill can take: its share of compute, plus loading that compute cannot hide.

    One layer can be computed while the next one loads; the first layer's load is always waited for.
    """
    return compute_s + max(load_s / layers, load_s - compute_s)


def copy_bandwidth(device: torch.device) -> float:
    """Measured bytes per second of a copy in the device's memory, median of five."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        watch = Stopwatch(device)
        target.copy_(source)
        seconds.append(watch.total())
    return _COPIED_BYTES / median(seconds)
