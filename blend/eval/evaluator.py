"""Measure methods in turns, in one process and on the same token ids, and compare them with full recompute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blend.chunks.surrogate import with_surrogate
from blend.compare import Fidelity, Reference
from blend.config import REPORT_TOKENS, BlendConfig
from blend.eval.dataset import Record
from blend.eval.metrics import names_one, word_f1
from blend.eval.report import BLEND, FULL, Measurement
from blend.model.decoder import FullPrefill, full_prefill
from blend.model.generate import generate
from blend.prefill.blender import Blend, Blender
from blend.prompt import PromptTemplate
from blend.types import Progress, PromptLayout, no_progress

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

    """

    def __init__(self, blender: Blender, template: PromptTemplate, *, max_new_tokens: int = REPORT_TOKENS) -> None:
        self.blender = blender
        self.decoder = blender.decoder
        self.template = template
        self.max_new_tokens = max_new_tokens

    def measure(self, record: Record, methods: Sequence[Method]) -> list[Measurement]:
        """One measurement a method. One of them must be full recompute: the others are compared with it.

        All chunks are cached beforehand. Raises `PromptError` when the record's prompt does not fit the model.
        """
        layout = self.template.layout(record.question, record.chunks)
        self.decoder.check_length(layout.rows + self.max_new_tokens)
        self.cache_chunks(layout)
        prefills = {method.name: self._prefill(layout, method) for method in methods}
        full = prefills[FULL]
        assert isinstance(full, FullPrefill)
        reference = Reference.of(full, layout, self.max_new_tokens)
        return [self._measured(record, layout, reference, name, prefills[name]) for name in prefills]

    def _measured(
        self, record: Record, layout: PromptLayout, reference: Reference, name: str, prefilled: FullPrefill | Blend
    ) -> Measurement:
        """Decode the answer, and compare it with full recompute's and with gold answers."""
        if isinstance(prefilled, FullPrefill):
            answer = reference.answer.text
            fidelity = Fidelity(0.0, 1.0)
            stages: Mapping[str, float] = {}
            rows_computed = float(layout.rows)
        else:
            fidelity = reference.fidelity(prefilled)
            prefilled.rewind()
            answer = generate(self.decoder, prefilled, layout.token_ids, max_new_tokens=self.max_new_tokens).text
            stages = prefilled.stages
            rows_computed = layout.rows * prefilled.rows_share
        return Measurement(
            method=name,
            record_id=record.id,
            answer=answer,
            ttft_s=prefilled.ttft_s,
            stages=stages,
            rows_total=layout.rows,
            rows_computed=rows_computed,
            f1=word_f1(answer, record.answers),
            right=names_one(answer, record.answers),
            task=record.task,
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
