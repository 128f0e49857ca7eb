"""Calibrates the estimates of `blend.quality` on questions: signals and true KL of each prompt at every ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blend.chunks.correction import CORRECTED
from blend.errors import PromptError
from blend.eval.evaluator import answer_of
from blend.eval.metrics import kl_divergence
from blend.files import keep_value, read_values
from blend.intervals import LEAST_SAMPLE
from blend.model.decoder import full_prefill
from blend.model.generate import Generation, generate, teacher_forced_logits
from blend.prefill.blender import Blender
from blend.quality import COMPARED_TOKENS, RATIOS, Calibration, Drift, Estimate, Quality, Signals
from blend.types import Progress, PromptLayout, no_progress
from blend.version import __version__

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

    Prompts that were measured before an interruption are not measured again.

    Args:
        rag: The corpus; precomputed, with its KV correction.
        questions: Those of the first `PROMPTS` are used whose prompt fits the model.
        progress: Called with the stage "questions".

    Returns:
        The calibration.

    Raises:
        PromptError: Fewer than `LEAST_SAMPLE` questions gave a prompt with stored chunks.
        StoreError: The store cannot be read or written.

    """
    begun = rag.root / "calibrating.json"
    found = list(_measured(rag, questions[:PROMPTS], begun, progress))
    if len(found) < LEAST_SAMPLE:
        raise PromptError(
            f"{len(found)} questions gave a prompt to calibrate on, {LEAST_SAMPLE} are needed: give more questions"
        )
    calibration = Calibration(*zip(*((one.signals, one.kl, one.flips) for one in found), strict=True))
    library = rag.blender.library(rag.template.prefix)
    library.store.write_artifact(library.isolated.identity.quality_name, calibration.to_bytes())
    with suppress(OSError):
        begun.unlink(missing_ok=True)
    return calibration


class ComparedPrompt(NamedTuple):
    """A prompt at all `RATIOS`, compared with full recompute.

    kl: nats a token. flips: whether the greedy answer differs. answers: greedy, of at most `COMPARED_TOKENS` tokens; the last
    one is full recompute's; none if the prompt was measured before an interruption.
    """

    signals: tuple[Signals, ...]
    kl: tuple[float, ...]
    flips: tuple[bool, ...]
    answers: tuple[str, ...] = ()


def _measured(rag: Rag, questions: Sequence[str], begun: Path, progress: Progress) -> Iterator[ComparedPrompt]:
    """The questions' prompts that fit the model. begun: a JSON file that keeps what was measured, by prompt."""
    made_with = _made_with(rag)
    for place, question in enumerate(questions):
        ranked = rag.retriever.search(question, rag.corpus_config.top_k)
        layout = rag.template.layout(question, [hit.chunk for hit in ranked])
        name = sha256(f"{made_with} {layout.token_ids}".encode()).hexdigest()
        found = _kept(begun, name)
        if found is None:
            with suppress(PromptError):
                rag.decoder.check_length(layout.rows + COMPARED_TOKENS)
                found = measure(rag.blender, layout)
            if found is not None:
                keep_value(begun, name, found[:3])
        progress("questions", place + 1, len(questions))
        if found is not None:
            yield found


def _made_with(rag: Rag) -> str:
    """What a prompt's measurement depends on, besides its tokens."""
    library, store = rag.blender.library(rag.template.prefix), rag.blender.store
    identity = library.isolated.identity
    names = [library.encoder(kind).identity.correction_name for kind in CORRECTED]
    corrections = [sha256(store.read_artifact(name) or b"").hexdigest() for name in names]
    return " ".join([__version__, identity.quality_name, str(rag.blend_config.selector), *corrections])


def _kept(begun: Path, name: str) -> ComparedPrompt | None:
    kept = read_values(begun, list).get(name)
    with suppress(TypeError, ValueError):
        if kept is not None and {len(column) for column in kept} == {len(RATIOS)}:
            signals, kl, flips = kept
            return ComparedPrompt(tuple(Signals(*map(float, one)) for one in signals), tuple(kl), tuple(flips))
    return None


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
