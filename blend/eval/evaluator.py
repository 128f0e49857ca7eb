"""Measure methods in turns, in one process and on the same token ids, and compare them with full recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

import torch

from blend.chunks.surrogate import with_surrogate
from blend.compare import Fidelity, Reference
from blend.config import REPORT_TOKENS, BlendConfig
from blend.eval.dataset import Record
from blend.eval.metrics import exact_match, has_rouge, names_one, rouge_l, wants_rouge, word_f1
from blend.eval.report import BLEND, FULL, REUSE, Measurement
from blend.layout import PromptLayout
from blend.model.decoder import FullPrefill, full_prefill
from blend.model.generate import generate
from blend.prefill.blender import Blend, Blender
from blend.prompt_template import PromptTemplate
from blend.select import make_selector
from blend.stopwatch import Progress, Stopwatch, no_progress

PLAIN_REUSE = BlendConfig(selector="none", correction=False, surrogate=False)
_COPIED_BYTES = 64 << 20
_COPIES = 5


@dataclass(frozen=True)
class Method:
    """A way to prefill under the name it has in the report; config None is the model's own full prefill."""

    name: str
    config: BlendConfig | None = None


def standard_methods(
    config: BlendConfig, selectors: Sequence[str] = (), ratios: Sequence[float] = ()
) -> tuple[Method, ...]:
    """Full recompute, plain reuse, and blended prefill in one way or several.

    Args:
        config: How to blend.
        selectors: Specs to compare; by default the one of `config`.
        ratios: Ratios to compare, each with every selector; by default the one of `config`.

    Returns:
        The methods. A single way to blend is called "blend", several ones by their selectors, and ratios if these are several.

    """
    configs = [
        replace(config, selector=selector, ratio=ratio)
        for selector in dict.fromkeys(selectors or (config.selector,))
        for ratio in dict.fromkeys(ratios or (config.ratio,))
    ]
    names = [BLEND] if len(configs) == 1 else [_name_of(each, with_ratio=len(set(ratios)) > 1) for each in configs]
    blends = [Method(name, each) for name, each in zip(names, configs, strict=True)]
    return (Method(FULL), Method(REUSE, PLAIN_REUSE), *blends)


def _name_of(config: BlendConfig, *, with_ratio: bool) -> str:
    spec = make_selector(config.selector).spec
    return f"{spec} {100 * config.ratio:.4g}%" if with_ratio else spec


@dataclass
class _Times:
    """Times of one method's prefills of one record."""

    method: str
    ttft_s: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    def add(self, prefilled: FullPrefill | Blend) -> None:
        self.ttft_s.append(prefilled.ttft_s)
        if isinstance(prefilled, Blend):
            self.stages.append(dict(prefilled.stages))

    @property
    def median_stages(self) -> dict[str, float]:
        names = dict.fromkeys(name for stages in self.stages for name in stages)
        return {name: median(stages.get(name, 0.0) for stages in self.stages) for name in names}


class Evaluator:
    """Measures methods on records.

    Args:
        blender: Blends the prompts, and knows the decoder.
        template: Lays out the prompts.
        max_new_tokens: Longest answer.
        repeats: Timed prefills of each method on each record, of which the median counts.

    """

    def __init__(
        self, blender: Blender, template: PromptTemplate, *, max_new_tokens: int = REPORT_TOKENS, repeats: int = 1
    ) -> None:
        self.blender = blender
        self.decoder = blender.decoder
        self.template = template
        self.max_new_tokens = max_new_tokens
        self.repeats = repeats

    @cached_property
    def _bandwidth(self) -> float:
        return copy_bandwidth(self.decoder.device)

    def measure(self, record: Record, methods: Sequence[Method]) -> list[Measurement]:
        """One measurement a method. One of them must be full recompute: the others are compared with it.

        All chunks are cached beforehand. Raises `PromptError` when the record's prompt does not fit the model.
        """
        layout = self.template.layout(record.question, record.chunks)
        self.decoder.check_length(layout.rows + self.max_new_tokens)
        self.cache_chunks(layout)
        times = {method.name: _Times(method.name) for method in methods}
        for method in [*methods] * (self.repeats - 1):
            times[method.name].add(self._prefill(layout, method))
        measured = {}
        for method in sorted(methods, key=lambda method: method.name != FULL):  # the others are compared with it
            prefilled = self._prefill(layout, method)
            times[method.name].add(prefilled)
            if isinstance(prefilled, FullPrefill):
                reference = Reference.of(prefilled, layout, self.max_new_tokens)
                full_s = median(times[FULL].ttft_s)
            measured[method.name] = self._measured(record, layout, reference, full_s, times[method.name], prefilled)
            del prefilled  # one prompt at a time is in memory
        return [measured[method.name] for method in methods]

    def _measured(
        self,
        record: Record,
        layout: PromptLayout,
        reference: Reference,
        full_s: float,
        times: _Times,
        prefilled: FullPrefill | Blend,
    ) -> Measurement:
        """Decode the answer, and compare it with full recompute's and with gold answers."""
        floor_s: float | None = None
        if isinstance(prefilled, FullPrefill):
            answer = reference.answer.text
            fidelity = Fidelity(0.0, 1.0)
            rows_computed = float(layout.rows)
        else:
            fidelity = reference.fidelity(prefilled)
            prefilled.rewind()
            answer = generate(self.decoder, prefilled, layout.token_ids, max_new_tokens=self.max_new_tokens).text
            rows_computed = layout.rows * prefilled.rows_share
            load_s = prefilled.bytes_loaded / self._bandwidth
            floor_s = floor_seconds(prefilled.rows_share * full_s, load_s, len(self.decoder.layers))
        measures_rouge = wants_rouge(record.answers, record.task) and has_rouge()
        return Measurement(
            method=times.method,
            record_id=record.id,
            answer=answer,
            ttft_s=median(times.ttft_s),
            stages=times.median_stages,
            rows_total=layout.rows,
            rows_computed=rows_computed,
            floor_s=floor_s,
            f1=word_f1(answer, record.answers),
            em=exact_match(answer, record.answers),
            rouge_l=rouge_l(answer, record.answers) if measures_rouge else None,
            right=names_one(answer, record.answers),
            task=record.task,
            question=record.question,
            gold=record.answers,
            **fidelity._asdict(),
        )

    def calibrate(self, records: Sequence[Record], surrogate_tokens: int, progress: Progress = no_progress) -> None:
        """Choose a surrogate context and measure the KV corrections on the chunks of these records, where the store holds none.

        Its prompts are chunks in random order, never a record's own prompt.

        Args:
            records: The records.
            surrogate_tokens: Length of the surrogate context; 0 chooses none.
            progress: Called with the stage "calibrate".

        """
        texts = [chunk for record in records for chunk in record.chunks]
        chunks = list(dict.fromkeys(map(self.template.chunk_ids, texts)))
        library = self.blender.library(self.template.prefix)
        if surrogate_tokens and not library.decided:
            with_surrogate(library, chunks, surrogate_tokens)
        self.blender.calibrate(self.template.prefix, chunks, progress=progress)

    def warm_up(self, record: Record, methods: Sequence[Method]) -> None:
        """Run every method once, uncounted: first calls pay for allocation and kernel choice."""
        layout = self.template.layout(record.question, record.chunks)
        self.cache_chunks(layout)
        for method in methods:
            self._prefill(layout, method)

    def cache_chunks(self, layout: PromptLayout) -> None:
        """Compute and store the caches of the prompt's chunks that are missing."""
        library = self.blender.library(layout.kept_behind)
        library.compute(library.missing(layout.chunks))

    def _prefill(self, layout: PromptLayout, method: Method) -> FullPrefill | Blend:
        if method.config is None:
            return full_prefill(self.decoder, layout)
        return self.blender.prefill(layout, config=method.config, room=self.max_new_tokens)


def floor_seconds(compute_s: float, load_s: float, layers: int) -> float:
    """The least time that a blended prefill can take: its share of computing, and the loading that this cannot hide.

    A layer can be computed while the next one loads; the first layer's load is always waited for.
    """
    return compute_s + max(load_s / layers, load_s - compute_s)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy from memory to `device`, for a GPU from page-locked memory; a median of several."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_COPIES):
        watch = Stopwatch(device)
        target.copy_(source)
        times.append(watch.total())
    return _COPIED_BYTES / median(times)
