"""Compares blended answers with full recompute: at once for a request that asks for it, in idle time for a sample of all.

Full prefill of the prompt runs with the answer as its draft: one pass over the answer's tokens tells how far full recompute
says the same, and it goes on alone from there. Sampled answers are drawn again with the same seed.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cachetools import LRUCache

from blend.errors import PromptError
from blend.intervals import LEAST_SAMPLE, Interval, decide, mean_interval, share_interval
from blend.serve.failures import LOG
from blend.serve.types import (
    ASKED_FOR,
    Audit,
    AuditedMean,
    Check,
    EngineFailedError,
    Event,
    Failed,
    Finished,
    OnEvent,
    Output,
    Promise,
    QueueFullError,
    Request,
    Started,
    Token,
    ToolCall,
)
from blend.types import common_length

AUDITED_TOKENS = 32  # of an answer
ALTERNATIVES = 20  # likely tokens by which distributions are compared
_SEEDS = 2**31
_MOST_CORPORA, _JUDGED_AUDITS = 1024, 256
Submit = Callable[[Request, OnEvent], None]


def seeded(request: Request) -> Request:
    """The request with a seed, so that its answer can be drawn again."""
    if request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=random.randrange(_SEEDS)))


def recomputed(request: Request, answer: Sequence[int]) -> Request:
    """The same request in full, with this answer as the draft; less urgent than the request was."""
    return replace(
        request,
        method="full",
        reason=ASKED_FOR,
        draft=tuple(answer),
        priority=request.priority + 1,
        trace=False,
        deadline_s=None,
        remember=False,
        learn=None,
        arrived=time.monotonic(),
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


class Verification:
    """Passes on the events of one request, and checks its answer before the last of them.

    submit: takes prepared requests. Cancelling the request cancels the check too. An answer whose check ends early, as at
    shutdown, is whole and not compared.
    """

    def __init__(self, submit: Submit, request: Request, on_event: OnEvent) -> None:
        self._submit, self._request, self._send = submit, request, on_event
        self._given, self._full = _Answer(), _Answer()
        self._reason: Finished | None = None
        self._begun = 0.0

    def on_event(self, event: Event) -> None:
        """An event of the request."""
        self._given.take(event)
        if not isinstance(event, Finished) or event.reason not in ("stop", "length"):
            self._send(event)
            return
        self._reason, self._begun = event, time.monotonic()
        self._send(event._replace(last=False))
        started = self._given.started
        if started is not None and started.figures.method == "full":
            self._end(Check(True, len(self._given.ids), reason="computed in full"))
            return
        try:
            self._submit(recomputed(self._request, self._given.ids), self._checked)
        except (QueueFullError, EngineFailedError, PromptError) as error:
            self._end(Check(None, 0, reason=str(error)))

    def _checked(self, event: Event) -> None:
        """An event of the full recompute."""
        self._full.take(event)
        if isinstance(event, Failed):
            self._end(Check(None, 0, reason=str(event.error)))
        elif isinstance(event, Finished) and event.reason not in ("stop", "length"):
            self._end(Check(None, 0, reason=event.reason))  # the answer is whole
        elif isinstance(event, Finished):
            given, full = self._given.ids, self._full.ids
            same = common_length(given, full)
            if given == full:
                self._end(Check(True, same))
            else:
                self._end(Check(False, same, same, self._full.text, tuple(self._full.calls)))

    def _end(self, check: Check) -> None:
        assert self._reason is not None
        check = check._replace(seconds=time.monotonic() - self._begun)
        self._send(self._reason._replace(last=True, check=check))


def coarse_kl(full: Token, blended: Token) -> float:
    """KL of two next-token distributions, over the tokens that both list, and all others together; nats."""
    theirs = {one.id: one.logprob for one in blended.top}
    pairs = [(one.logprob, theirs[one.id]) for one in full.top if one.id in theirs]
    kl = sum(math.exp(mine) * (mine - other) for mine, other in pairs)
    rest = [max(1e-9, 1 - sum(math.exp(pair[side]) for pair in pairs)) for side in (0, 1)]
    return max(0.0, kl + rest[0] * math.log(rest[0] / rest[1]))


@dataclass
class _Audited:
    """An answer to audit: blended anew with the answer as draft, then in full. Both list likely tokens."""

    request: Request
    answer: tuple[int, ...]
    blended: tuple[Token, ...] = ()
    quality: Mapping[str, float | None] | None = None


class Auditor:
    """Audits a share of blended answers while the engine is idle.

    share: of answers, 0 to 1. on_audit: called with each result, in the engine's thread.
    """

    def __init__(self, share: float, on_audit: Callable[[Audit], None], most: int = 64) -> None:
        self.share, self._on_audit = share, on_audit
        self._waiting: deque[_Audited] = deque(maxlen=most)
        self._draw = random.Random()

    def watched(self, request: Request, on_event: OnEvent) -> OnEvent:
        """Events go to `on_event`; if the draw says so, the answer is remembered for an audit."""
        if request.method == "full" or request.handover is not None or self._draw.random() >= self.share:
            return on_event
        answer = _Answer()

        def watch(event: Event) -> None:
            answer.take(event)
            on_event(event)
            whole = isinstance(event, Finished) and event.last and event.reason in ("stop", "length")
            if whole and answer.started is not None and answer.started.figures.method == "blend":
                self._waiting.append(_Audited(request, tuple(answer.ids[:AUDITED_TOKENS])))

        return watch

    def next(self) -> tuple[Request, OnEvent] | None:
        """The next request to run, and what takes its events; None if nothing waits."""
        if not self._waiting:
            return None
        one = self._waiting.popleft()
        listed = replace(one.request.sampling, max_tokens=len(one.answer), logprobs=ALTERNATIVES, n=1)
        request = replace(recomputed(one.request, one.answer), sampling=listed, cancelled=threading.Event(), cold=True)
        if not one.blended:
            request = replace(request, method="blend")
        answer = _Answer()

        def take(event: Event) -> None:
            answer.take(event)
            if not isinstance(event, Finished):
                return
            if event.reason not in ("stop", "length"):
                self._waiting.appendleft(one)  # interrupted: later again
            elif one.blended:
                self._on_audit(_audited(one, answer.tokens))
            elif answer.started is not None and answer.started.figures.method == "blend":  # its caches are still there
                quality = answer.started.figures.quality
                self._waiting.appendleft(replace(one, blended=tuple(answer.tokens), quality=quality))

        return request, take


def _audited(one: _Audited, full: Sequence[Token]) -> Audit:
    same, again = (common_length(one.answer, [token.id for token in said]) for said in (full, one.blended))
    compared = list(zip(full, one.blended, strict=False))[: min(same, again) + 1]  # behind the same tokens
    kl = sum(coarse_kl(*pair) for pair in compared) / max(1, len(compared))
    flipped = same < len(one.answer)
    return Audit(one.request.tenant, one.request.corpus, len(one.answer), flipped, kl, one.quality)


class Promises:
    """Judges by audits whether each corpus keeps the quality that is asked for, and logs when that changes."""

    def __init__(self) -> None:
        self._audits: LRUCache[tuple[str, str], deque[Audit]] = LRUCache(_MOST_CORPORA)
        self._broken = set[tuple[str, str]]()

    def judged(self, audit: Audit) -> Audit:
        """The audit with its corpus's promise, this audit included."""
        if audit.quality is None:
            return audit
        where = audit.tenant, audit.corpus
        audits = self._audits.setdefault(where, deque(maxlen=_JUDGED_AUDITS))
        audits.append(audit)
        promise = promise_of(audits)
        if promise.kept == (where in self._broken):
            self._broken ^= {where}
            words, level = ("promise_kept", logging.INFO) if promise.kept else ("promise_broken", logging.WARNING)
            figures = {name: found._asdict() for name in ("kl", "flips") if (found := getattr(promise, name))}
            LOG.log(level, words, extra={"tenant": audit.tenant, "corpus": audit.corpus, **figures})
        return audit._replace(promise=promise)


def promise_of(audits: Sequence[Audit]) -> Promise:
    """What these audits of one corpus say of the qualities that were asked for, each judged by itself."""
    asked = [(audit, audit.quality) for audit in audits if audit.quality is not None]
    kl = _judged([(audit.kl, target) for audit, quality in asked if (target := quality["target"])], mean_interval)
    flips = _judged([(audit.flipped, target) for audit, quality in asked if (target := quality["flips"])], _share)
    found = (*kl, *flips)
    broken = any(decide(Interval(one.mean, one.low, one.high), one.audits, one.target) == "broken" for one in found)
    return Promise(_least_kept(kl), _least_kept(flips), not broken)


def _least_kept(found: Sequence[AuditedMean]) -> AuditedMean | None:
    """The one farthest above its target, of those with enough audits if there are such."""
    excess = [(one.audits >= LEAST_SAMPLE, one.low / one.target, one.mean / one.target, one) for one in found]
    return max(excess)[3] if excess else None


def _judged(pairs: Sequence[tuple[float, float]], interval: Callable[[Sequence[float]], Interval]) -> list[AuditedMean]:
    """Of audited values with the targets that they were under: one mean for each target."""
    values = defaultdict[float, list[float]](list)
    for value, target in pairs:
        values[target].append(value)
    found = [(interval(under), target, len(under)) for target, under in values.items()]
    return [AuditedMean(one.mean, one.low, one.high, target, count) for one, target, count in found]


def _share(flipped: Sequence[float]) -> Interval:
    return share_interval(round(sum(flipped)), len(flipped))
