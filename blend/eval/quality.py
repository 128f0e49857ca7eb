"""Calibrates the estimates of `blend.quality` on questions: signals and true KL of each prompt at every ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from blend.blender import Blender
from blend.errors import PromptError
from blend.eval.evaluator import answer_of
from blend.eval.metrics import kl_divergence
from blend.model.decoder import full_prefill
from blend.model.generate import Generation, generate, teacher_forced_logits
from blend.quality import COMPARED_TOKENS, LEAST_PROMPTS, RATIOS, Calibration, Drift, Estimate, Quality, Signals
from blend.types import Progress, PromptLayout, no_progress

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.rag import Rag

PROMPTS = 160  # of a calibration, at most
MADE = 40  # questions made from chunks


@dataclass(frozen=True)
class FixedRatio:
    """Takes the place of stored calibrations, and chooses the same ratio for every prompt.

    seen: the signals of each prompt at all `RATIOS`.
    """

    ratio: float
    seen: list[Sequence[Signals]] = field(default_factory=list)
    drift: Drift = field(default_factory=Drift)

    def target(self, library: ChunkLibrary, quality: Quality) -> FixedRatio:
        """Itself."""
        return self

    def choice(self, signals: Sequence[Signals]) -> Estimate:
        """Its ratio; no KL is known yet."""
        self.seen.append(signals)
        return Estimate(0.0, Quality(), self.ratio, 0)


def calibrate_quality(rag: Rag, questions: Sequence[str], progress: Progress = no_progress) -> Calibration:
    """Measure and store the calibration of a corpus, on prompts as `Rag.answer` makes them.

    Args:
        rag: The corpus; precomputed, with its KV correction.
        questions: Those of the first `PROMPTS` are used whose prompt fits the model.
        progress: Called with the stage "questions".

    Returns:
        The calibration.

    Raises:
        PromptError: Fewer than `LEAST_PROMPTS` questions gave a prompt with stored chunks.
        StoreError: The store cannot be read or written.

    """
    found = list(_measured(rag, questions[:PROMPTS], progress))
    if len(found) < LEAST_PROMPTS:
        raise PromptError(
            f"{len(found)} questions gave a prompt to calibrate on, {LEAST_PROMPTS} are needed: give more questions"
        )
    calibration = Calibration(*zip(*((one.signals, one.kl, one.flips) for one in found), strict=True))
    library = rag.blender.library(rag.template.prefix)
    library.store.write_artifact(library.isolated.identity.quality_name, calibration.to_bytes())
    return calibration


class ComparedPrompt(NamedTuple):
    """A prompt at all `RATIOS`, compared with full recompute.

    kl: nats a token. flips: whether the greedy answer differs. answers: greedy, of at most `COMPARED_TOKENS` tokens; the last
    one is full recompute's.
    """

    signals: tuple[Signals, ...]
    kl: tuple[float, ...]
    flips: tuple[bool, ...]
    answers: tuple[str, ...]


def _measured(rag: Rag, questions: Sequence[str], progress: Progress) -> Iterator[ComparedPrompt]:
    for place, question in enumerate(questions):
        ranked = rag.retriever.search(question, rag.corpus_config.top_k)
        layout = rag.template.layout(question, [hit.chunk for hit in ranked])
        try:
            rag.decoder.check_length(layout.rows + COMPARED_TOKENS)
            found = measure(rag.blender, layout)
        except PromptError:
            found = None
        progress("questions", place + 1, len(questions))
        if found is not None:
            yield found


def measure(blender: Blender, layout: PromptLayout) -> ComparedPrompt | None:
    """Compare a prompt with full recompute; None if it shows no signals."""
    library = blender.library(layout.kept_behind)
    library.compute(library.missing(layout.chunks))
    full, truth = answer_of(full_prefill(blender.decoder, layout), layout, COMPARED_TOKENS)
    measuring = Blender(blender.decoder, blender.store, blender.config, corpus=blender.corpus)
    kl, answers = list[float](), list[Generation]()
    for ratio in RATIOS:
        judge = measuring.calibrations = FixedRatio(ratio)
        blend = measuring.prefill(layout, config=replace(blender.config, quality=1.0), room=COMPARED_TOKENS)
        if not judge.seen:
            return None
        kl.append(float(kl_divergence(truth, teacher_forced_logits(blend, full.token_ids)).mean()))
        blend.rewind()
        answers.append(generate(blender.decoder, blend, layout.token_ids, max_new_tokens=COMPARED_TOKENS))
        blend.cache.free()
    flips = tuple(one.token_ids != full.token_ids for one in answers)
    return ComparedPrompt(tuple(judge.seen[-1]), tuple(kl), flips, tuple(one.text for one in (*answers, full)))
