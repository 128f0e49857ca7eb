"""Fits the estimates of `blend.quality` to questions: signals and true KL of each prompt at every ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blend.compare import Reference
from blend.errors import PromptError
from blend.files import keep_value, read_values
from blend.intervals import LEAST_SAMPLE
from blend.layout import PromptLayout
from blend.model.decoder import full_prefill
from blend.model.generate import Generation, generate
from blend.prefill.blender import Blender
from blend.quality import COMPARED_TOKENS, RATIOS, Estimate, Estimator, Quality, Signals
from blend.stopwatch import Progress, no_progress
from blend.types import CacheKind
from blend.version import __version__

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.rag import Rag

PROMPTS = 160  # that an estimator is fitted to, at most
MADE = 40  # questions made from chunks
UNFINISHED = "estimating.json"  # in the folder of the corpus


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

    Prompts that were measured before an interruption are not measured again.

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
    unfinished = rag.root / UNFINISHED
    prompts = list(_measured(rag, questions[:PROMPTS], unfinished, progress))
    if len(prompts) < LEAST_SAMPLE:
        raise PromptError(
            f"{len(prompts)} questions gave a prompt to fit estimates to, {LEAST_SAMPLE} are needed: give more questions"
        )
    estimator = Estimator(
        signals=tuple(prompt.signals for prompt in prompts),
        kl=tuple(prompt.kl for prompt in prompts),
        flips=tuple(prompt.flips for prompt in prompts),
    )
    library = rag.blender.library(rag.template.prefix)
    library.store.write_artifact(library.isolated.identity.quality_name, estimator.to_bytes())
    with suppress(OSError):
        unfinished.unlink(missing_ok=True)
    return estimator


class MeasuredPrompt(NamedTuple):
    """A prompt at all `RATIOS`, compared with full recompute.

    kl: nats a token. flips: whether the greedy answer differs. answers: greedy, of at most `COMPARED_TOKENS` tokens; the last
    one is full recompute's. None if the prompt was measured before an interruption.
    """

    signals: tuple[Signals, ...]
    kl: tuple[float, ...]
    flips: tuple[bool, ...]
    answers: tuple[str, ...] = ()


def _measured(rag: Rag, questions: Sequence[str], unfinished: Path, progress: Progress) -> Iterator[MeasuredPrompt]:
    """The questions' prompts that fit the model. unfinished: a JSON file that keeps what was measured, by prompt."""
    settings = _settings(rag)
    for place, question in enumerate(questions, 1):
        _, layout = rag.retrieve(question)
        name = sha256(f"{settings} {layout.token_ids}".encode()).hexdigest()
        prompt = _measured_before(unfinished, name)
        if prompt is None:
            with suppress(PromptError):
                rag.decoder.check_length(layout.rows + COMPARED_TOKENS)
                prompt = measure(rag.blender, layout)
            if prompt is not None:
                keep_value(unfinished, name, prompt[:3])
        progress("questions", place, len(questions))
        if prompt is not None:
            yield prompt


def _settings(rag: Rag) -> str:
    """Everything that a prompt's measurement depends on, besides its tokens."""
    library = rag.blender.library(rag.template.prefix)
    identity = library.isolated.identity
    names = [library.encoder(kind).identity.correction_name for kind in CacheKind]
    artifacts = [rag.blender.store.read_artifact(name) or b"" for name in names]
    corrections = [sha256(artifact).hexdigest() for artifact in artifacts]
    config = replace(rag.blend_config, quality=None, flips=None, reproducible=False)
    return " ".join([__version__, identity.quality_name, str(config.plain()), *corrections])


def _measured_before(unfinished: Path, name: str) -> MeasuredPrompt | None:
    columns = read_values(unfinished, list).get(name)
    with suppress(TypeError, ValueError):
        if columns is not None and {len(column) for column in columns} == {len(RATIOS)}:
            pairs, kl, flips = columns
            signals = tuple(Signals(*map(float, pair)) for pair in pairs)
            return MeasuredPrompt(signals, tuple(kl), tuple(flips))
    return None


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
