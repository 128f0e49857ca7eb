"""Audits compare blended answers with full recompute: at once for a request that asks for it, in idle time for a sample of all.

Full prefill of the prompt runs with the answer as its draft: one pass over the answer's tokens tells how far full recompute
says the same, and it goes on alone from there. Sampled answers are drawn again with the same seed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from blend.compare import likely_kl
from blend.errors import PromptError
from blend.layout import common_length
from blend.serve.events import (
    Audit,
    Check,
    EngineFailedError,
    Event,
    Failed,
    Figures,
    Finished,
    OnEvent,
    Output,
    QueueFullError,
    Started,
    Token,
)
from blend.serve.prompt import ASKED_FOR, Prompt
from blend.serve.request import ToolCall
from blend.serve.turns import TurnQueue

AUDITED_TOKENS = 32  # of an answer
ALTERNATIVES = 20  # likely tokens by which distributions are compared
Submit = Callable[[Prompt, OnEvent], None]
OnFlip = Callable[[Prompt, Figures], None]
"""Called with a prompt of which full recompute gives another answer, and with what it cost."""


def recomputed(prompt: Prompt, answer: Sequence[int]) -> Prompt:
    """The same prompt in full, with this answer as the draft; less urgent than the request was."""
    request = replace(
        prompt.request, priority=prompt.request.priority + 1, trace=False, deadline_s=None, arrived=time.monotonic()
    )
    return replace(
        prompt, request=request, full_because=ASKED_FOR, draft=tuple(answer), remember=False, learn=None, stopped=set()
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


def verified(submit: Submit, prompt: Prompt, send: OnEvent, on_flip: OnFlip) -> OnEvent:
    """Takes the events of one request, and audits its answer before it passes on the last of them.

    Cancelling the request cancels the audit too. An answer whose audit ends early, as at shutdown, is whole and not compared.

    Args:
        submit: Takes prompts.
        prompt: The request's.
        send: Takes its events.
        on_flip: Called if full recompute gives another answer.

    """
    answer = _Answer()

    def take(event: Event) -> None:
        answer.take(event)
        if not (isinstance(event, Finished) and _is_whole(event)):
            send(event)
            return
        send(event._replace(last=False))
        begun = time.monotonic()
        full = _Answer()

        def finish(check: Check) -> None:
            if check.verified is False and answer.started is not None:
                on_flip(prompt, answer.started.figures)
            send(event._replace(last=True, check=check._replace(seconds=time.monotonic() - begun)))

        def take_full(event: Event) -> None:
            full.take(event)
            if isinstance(event, Failed):
                finish(Check(None, 0, reason=str(event.error)))
            elif isinstance(event, Finished):
                finish(_compared(answer, full) if _is_whole(event) else Check(None, 0, reason=event.reason))

        if not answer.blended:
            finish(Check(True, len(answer.ids), reason="computed in full"))
            return
        try:
            submit(recomputed(prompt, answer.ids), take_full)
        except (QueueFullError, EngineFailedError, PromptError) as error:
            finish(Check(None, 0, reason=str(error)))

    return take


def _compared(answer: _Answer, full: _Answer) -> Check:
    common = common_length(answer.ids, full.ids)
    if answer.ids == full.ids:
        return Check(True, common)
    return Check(False, common, common, full.text, tuple(full.calls))


def _is_whole(end: Finished) -> bool:
    """Whether nothing cut the answer short."""
    return end.reason in ("stop", "length")


@dataclass
class _Sample:
    """An answer to audit: blended anew with the answer as draft, then in full. Both list likely tokens.

    An answer from moved rows is not blended anew: what was served is compared with full recompute's answer, without a KL.
    """

    prompt: Prompt
    answer: tuple[int, ...]
    served: Figures
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
            kl=sum(kl) / len(kl) if kl else None,
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
        on_flip: OnFlip = lambda prompt, figures: None,
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
            if isinstance(event, Finished) and event.last and _is_whole(event) and answer.blended:
                assert answer.started is not None
                self._add(_Sample(prompt, tuple(answer.ids[:AUDITED_TOKENS]), answer.started.figures))

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
        sampling = replace(prompt.sampling, max_tokens=len(sample.answer), logprobs=ALTERNATIVES, n=1)
        full_because = ASKED_FOR if sample.blended or sample.served.rows_moved else ""
        prompt = replace(prompt, request=request, sampling=sampling, full_because=full_because)
        answer = _Answer()

        def take(event: Event) -> None:
            answer.take(event)
            if isinstance(event, Finished):
                self._take_answer(sample, answer, whole=_is_whole(event))

        return prompt, take

    def _take_answer(self, sample: _Sample, answer: _Answer, *, whole: bool) -> None:
        if not whole:
            self._add(sample)  # interrupted: later again
        elif sample.blended or not answer.blended:  # full recompute
            audit = sample.audited(answer.tokens)
            if audit.flipped:
                self._on_flip(sample.prompt, sample.served)
            self._on_audit(audit)
        elif answer.started is not None:
            quality = answer.started.figures.quality
            self._add(replace(sample, blended=tuple(answer.tokens), quality=quality))

    def _add(self, sample: _Sample) -> None:
        with self._lock:
            self._waiting.add(sample.prompt.request.tenant, sample)
