"""Fits the estimates of `blend.quality` to questions: signals and true KL of each prompt at every ratio."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from blend.compare import Reference
from blend.errors import PromptError
from blend.intervals import LEAST_SAMPLE
from blend.model.decoder import full_prefill
from blend.model.generate import Generation, generate
from blend.prefill.blender import Blender
from blend.quality import COMPARED_TOKENS, RATIOS, Estimate, Estimator, Quality, Signals
from blend.types import Progress, PromptLayout, no_progress

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.rag import Rag

PROMPTS = 160  # that an estimator is fitted to, at most
MADE = 40  # questions made from chunks


@dataclass(frozen=True)
class FixedRatio:
    """Takes the place of stored estimators, and chooses the same ratio for every prompt.

    prompts: the signals of each prompt at all `RATIOS`.
    """

    ratio: float
    prompts: list[Sequence[Signals]] = field(default_factory=list)

    def target(self, library: ChunkLibrary, quality: Quality) -> FixedRatio:
        """Serve every quality itself."""
        return self

    def choice(self, signals: Sequence[Signals]) -> Estimate:
        """Choose the ratio; no KL is known yet."""
        self.prompts.append(signals)
        return Estimate(0.0, Quality(), self.ratio, 0)


def fit_estimator(rag: Rag, questions: Sequence[str], progress: Progress = no_progress) -> Estimator:
    """Fit and store the estimator of a corpus, on prompts as `Rag.answer` makes them.

    Args:
        rag: The corpus; precomputed, with its KV correction.
        questions: Those of the first `PROMPTS` are used whose prompt fits the model.
        progress: Called with the stage "questions".

    Returns:
        The estimator.

    Raises:
        PromptError: Fewer than `LEAST_SAMPLE` questions gave a prompt with stored chunks.
        StoreError: The store cannot be read or written.

    """
    prompts = []
    for place, question in enumerate(questions[:PROMPTS], 1):
        _, layout = rag.retrieve(question)
        with suppress(PromptError):
            rag.decoder.check_length(layout.rows + COMPARED_TOKENS)
            prompts.append(measure(rag.blender, layout))
        progress("questions", place, min(len(questions), PROMPTS))
    measured = [prompt for prompt in prompts if prompt is not None]
    if len(measured) < LEAST_SAMPLE:
        raise PromptError(
            f"{len(measured)} questions gave a prompt to fit estimates to, {LEAST_SAMPLE} are needed: give more questions"
        )
    signals, kl, flips, _ = zip(*measured, strict=True)
    estimator = Estimator(signals, kl, flips)
    library = rag.blender.library(rag.template.prefix)
    library.store.write_artifact(library.isolated.identity.quality_name, estimator.to_bytes())
    return estimator


class MeasuredPrompt(NamedTuple):
    """A prompt at all `RATIOS`, compared with full recompute.

    kl: nats a token. flips: whether the greedy answer differs. answers: greedy, of at most `COMPARED_TOKENS` tokens; the last
    one is full recompute's.
    """

    signals: tuple[Signals, ...]
    kl: tuple[float, ...]
    flips: tuple[bool, ...]
    answers: tuple[str, ...]


def measure(blender: Blender, layout: PromptLayout) -> MeasuredPrompt | None:
    """Compare a prompt with full recompute; None if it shows no signals."""
    library = blender.library(layout.kept_behind)
    library.compute(library.missing(layout.chunks))
    full = Reference.of(full_prefill(blender.decoder, layout), layout, COMPARED_TOKENS)
    measuring = Blender(blender.decoder, blender.store, blender.config, corpus=blender.corpus)
    kl: list[float] = []
    answers: list[Generation] = []
    config = replace(blender.config, quality=1.0)
    for ratio in RATIOS:
        judge = measuring.estimators = FixedRatio(ratio)
        blend = measuring.prefill(layout, config=config, room=COMPARED_TOKENS)
        if not judge.prompts:
            return None
        kl.append(full.fidelity(blend).kl)
        blend.rewind()
        answers.append(generate(blender.decoder, blend, layout.token_ids, max_new_tokens=COMPARED_TOKENS))
        blend.cache.free()
    flips = tuple(answer.token_ids != full.answer.token_ids for answer in answers)
    texts = tuple(answer.text for answer in (*answers, full.answer))
    return MeasuredPrompt(tuple(judge.prompts[-1]), tuple(kl), flips, texts)
