"""Audits compare blended answers with full recompute: at once for a request that asks for it, in idle time for a sample of all.

Full prefill of the prompt runs with the answer as its draft: one pass over the answer's tokens tells how far full recompute
says the same, and it goes on alone from there. Sampled answers are drawn again with the same seed.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cachetools import LRUCache

from blend.compare import ComparedAnswer, Comparison, compare, likely_kl
from blend.errors import PromptError
from blend.intervals import LEAST_SAMPLE, Judged
from blend.quality import Quality
from blend.serve.events import (
    Audit,
    Check,
    EngineFailedError,
    Event,
    Failed,
    Finished,
    OnEvent,
    Output,
    Promise,
    QueueFullError,
    Started,
    Token,
)
from blend.serve.failures import LOG
from blend.serve.prompt import ASKED_FOR, Prompt
from blend.serve.request import ToolCall
from blend.serve.turns import TurnQueue
from blend.types import common_length

AUDITED_TOKENS = 32  # of an answer
ALTERNATIVES = 20  # likely tokens by which distributions are compared
_MOST_CORPORA = 1024
_JUDGED_AUDITS = 256  # of a corpus
Submit = Callable[[Prompt, OnEvent], None]
OnFlip = Callable[[Prompt], None]


def recomputed(prompt: Prompt, answer: Sequence[int]) -> Prompt:
    """The same prompt in full, with this answer as the draft; less urgent than the request was."""
    request = replace(
        prompt.request,
        priority=prompt.request.priority + 1,
        trace=False,
        deadline_s=None,
        arrived=time.monotonic(),
    )
    return replace(
        prompt,
        request=request,
        full_because=ASKED_FOR,
        draft=tuple(answer),
        remember=False,
        learn=None,
        stopped=set(),
    )


class _Answer:
    """The first answer to a request."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.tokens = list[Token]()
        self.text = ""
        self.calls = list[ToolCall]()

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Output) and event.answer == 0:
            self.tokens += event.tokens
            self.text += "" if event.thoughts else event.text
            self.calls += event.calls

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def blended(self) -> bool:
        return self.started is not None and self.started.figures.method == "blend"


class RequestedAudit:
    """Passes on the events of one request, and audits its answer before the last of them.

    Cancelling the request cancels the audit too. An answer whose audit ends early, as at shutdown, is whole and not compared.

    Args:
        submit: Takes prompts.
        prompt: The request's.
        on_event: Takes its events.
        on_flip: Called if full recompute gives another answer.

    """

    def __init__(
        self,
        submit: Submit,
        prompt: Prompt,
        on_event: OnEvent,
        on_flip: OnFlip,
    ) -> None:
        self._submit = submit
        self._prompt = prompt
        self._send = on_event
        self._on_flip = on_flip
        self._answer = _Answer()
        self._full = _Answer()
        self._end: Finished | None = None
        self._begun = 0.0

    def on_event(self, event: Event) -> None:
        """Take an event of the request."""
        self._answer.take(event)
        if not _is_whole(event):
            self._send(event)
            return
        assert isinstance(event, Finished)
        self._end = event
        self._begun = time.monotonic()
        self._send(event._replace(last=False))
        started = self._answer.started
        if started is not None and started.figures.method == "full":
            self._finish(Check(True, len(self._answer.ids), reason="computed in full"))
            return
        try:
            self._submit(recomputed(self._prompt, self._answer.ids), self._on_full_event)
        except (QueueFullError, EngineFailedError, PromptError) as error:
            self._finish(Check(None, 0, reason=str(error)))

    def _on_full_event(self, event: Event) -> None:
        """Take an event of full recompute."""
        self._full.take(event)
        if isinstance(event, Failed):
            self._finish(Check(None, 0, reason=str(event.error)))
        elif _is_whole(event):
            self._compare(self._answer.ids, self._full.ids)
        elif isinstance(event, Finished):
            self._finish(Check(None, 0, reason=event.reason))

    def _compare(self, answer: Sequence[int], full: Sequence[int]) -> None:
        common = common_length(answer, full)
        if answer == full:
            self._finish(Check(True, common))
            return
        self._on_flip(self._prompt)
        calls = tuple(self._full.calls)
        self._finish(Check(False, common, common, self._full.text, calls))

    def _finish(self, check: Check) -> None:
        assert self._end is not None
        check = check._replace(seconds=time.monotonic() - self._begun)
        self._send(self._end._replace(last=True, check=check))


def _is_whole(event: Event) -> bool:
    """Whether this ends an answer that nothing cut short."""
    return isinstance(event, Finished) and event.reason in ("stop", "length")


@dataclass
class _Sample:
    """An answer to audit: blended anew with the answer as draft, then in full. Both list likely tokens."""

    prompt: Prompt
    answer: tuple[int, ...]
    blended: tuple[Token, ...] = ()
    quality: Mapping[str, float | None] | None = None

    def audited(self, full: Sequence[Token]) -> Audit:
        """Compare with full recompute, behind the tokens that all three have in common."""
        common = common_length(self.answer, [token.id for token in full])
        common_blended = common_length(self.answer, [token.id for token in self.blended])
        compared = min(common, common_blended) + 1
        pairs = zip(full[:compared], self.blended[:compared], strict=False)
        kl = [likely_kl(_likely(token), _likely(blended)) for token, blended in pairs]
        return Audit(
            tenant=self.prompt.request.tenant,
            corpus=self.prompt.corpus,
            tokens=len(self.answer),
            flipped=common < len(self.answer),
            kl=sum(kl) / max(1, len(kl)),
            quality=self.quality,
        )


def _likely(token: Token) -> dict[int, float]:
    """Log-probabilities of the likely tokens in this token's place."""
    return {alternative.id: alternative.logprob for alternative in token.top}


class Auditor:
    """Audits a share of blended answers while the engine is idle; tenants take turns. It calls back in the engine's thread.

    Args:
        share: The share of answers, 0 to 1.
        on_audit: Called with each result.
        on_flip: Called with each prompt of which full recompute gives another answer.
        most: How many answers wait at most.

    """

    def __init__(
        self,
        share: float,
        on_audit: Callable[[Audit], None],
        on_flip: OnFlip = lambda prompt: None,
        most: int = 64,
    ) -> None:
        self.share = share
        self._on_audit = on_audit
        self._on_flip = on_flip
        self._waiting = TurnQueue[str, _Sample](most)
        self._lock = threading.Lock()  # answers end in the engine's thread, audits begin in another one
        self._draw = random.Random()

    def watched(self, prompt: Prompt, on_event: OnEvent) -> OnEvent:
        """Events go to `on_event`; if the draw says so, the answer is remembered for an audit."""
        if prompt.full_because or self._draw.random() >= self.share:
            return on_event
        answer = _Answer()

        def watch(event: Event) -> None:
            answer.take(event)
            on_event(event)
            last = isinstance(event, Finished) and event.last
            if last and _is_whole(event) and answer.blended:
                sample = _Sample(prompt, tuple(answer.ids[:AUDITED_TOKENS]))
                with self._lock:
                    self._waiting.add(prompt.request.tenant, sample)

        return watch

    def next(self) -> tuple[Prompt, OnEvent] | None:
        """The next prompt to run, and what takes its events; None if nothing waits."""
        with self._lock:
            turn = self._waiting.pop()
        if turn is None:
            return None
        _, sample = turn
        prompt = recomputed(sample.prompt, sample.answer)
        request = replace(prompt.request, cancelled=threading.Event(), cold=True)
        sampling = replace(
            prompt.sampling,
            max_tokens=len(sample.answer),
            logprobs=ALTERNATIVES,
            n=1,
        )
        full_because = ASKED_FOR if sample.blended else ""
        prompt = replace(prompt, request=request, sampling=sampling, full_because=full_because)
        answer = _Answer()

        def take(event: Event) -> None:
            answer.take(event)
            if isinstance(event, Finished):
                self._take_answer(sample, answer, whole=_is_whole(event))

        return prompt, take

    def _take_answer(self, sample: _Sample, answer: _Answer, *, whole: bool) -> None:
        if not whole:
            self._again(sample)  # interrupted: later again
        elif sample.blended:
            audit = sample.audited(answer.tokens)
            if audit.flipped:
                self._on_flip(sample.prompt)
            self._on_audit(audit)
        elif answer.started is not None and answer.blended:  # its caches are still there
            quality = answer.started.figures.quality
            self._again(replace(sample, blended=tuple(answer.tokens), quality=quality))

    def _again(self, sample: _Sample) -> None:
        self._waiting.put_back(sample.prompt.request.tenant, sample)


class Promises:
    """Judges by audits whether each corpus keeps the quality that is asked for, and logs when that changes."""

    def __init__(self) -> None:
        self._audits: LRUCache[tuple[str, str], deque[Audit]] = LRUCache(_MOST_CORPORA)
        self._broken = set[tuple[str, str]]()

    def judged(self, audit: Audit) -> Audit:
        """The audit with its corpus's promise, this audit included."""
        if audit.quality is None:
            return audit
        corpus = audit.tenant, audit.corpus
        audits = self._audits.setdefault(corpus, deque(maxlen=_JUDGED_AUDITS))
        audits.append(audit)
        promise = promise_of(audits)
        if promise.kept == (corpus in self._broken):
            self._broken ^= {corpus}
            _log(audit, promise)
        return audit._replace(promise=promise)


def _log(audit: Audit, promise: Promise) -> None:
    figures = {"kl": promise.kl, "flips": promise.flips}
    shown = {name: figure._asdict() for name, figure in figures.items() if figure is not None}
    extra = {"tenant": audit.tenant, "corpus": audit.corpus, **shown}
    if promise.kept:
        LOG.info("promise_kept", extra=extra)
    else:
        LOG.warning("promise_broken", extra=extra)


def promise_of(audits: Sequence[Audit]) -> Promise:
    """What these audits of one corpus say of the qualities that were asked for, each judged by itself."""
    kl = [_compared(group).judged(Quality(kl=target))["kl"] for target, group in _by_target(audits, "target")]
    flips = [_compared(group).judged(Quality(flips=target))["flips"] for target, group in _by_target(audits, "flips")]
    broken = any(figure.decision == "broken" for figure in (*kl, *flips))
    return Promise(_least_kept(kl), _least_kept(flips), not broken)


def _by_target(audits: Sequence[Audit], name: str) -> Iterable[tuple[float, list[Audit]]]:
    """The audits under each target that the estimates have under this name."""
    groups = defaultdict[float, list[Audit]](list)
    for audit in audits:
        if audit.quality is not None and (target := audit.quality[name]):
            groups[target].append(audit)
    return groups.items()


def _compared(audits: Sequence[Audit]) -> Comparison:
    return compare(ComparedAnswer(audit.flipped, audit.kl) for audit in audits)


def _least_kept(figures: Sequence[Judged]) -> Judged | None:
    """The figure farthest above its target, of those with enough audits if there are such."""

    def excess(figure: Judged) -> tuple[bool, float, float, Judged]:
        return figure.answers >= LEAST_SAMPLE, figure.low / figure.target, figure.mean / figure.target, figure

    return max(figures, key=excess, default=None)
