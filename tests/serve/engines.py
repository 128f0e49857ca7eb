"""Prompts for an embedded engine over a tiny model, and what comes back for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from queue import Queue
from typing import Any

import pytest
import torch
from cases import make_layout

from blend.layout import PromptLayout
from blend.model.generate import generate
from blend.model.passes import RowRequest
from blend.prefill.blender import Blender
from blend.sampling import Sampling
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.serve.engine.sequence import Sequence as EngineSequence
from blend.serve.events import EndReason, Event, Failed, Figures, Finished, Output, Started, Token
from blend.serve.prompt import Prompt, Source

MakeEngine = Callable[..., EmbeddedEngine]
FEW = Sampling(max_tokens=6)
LONG = Sampling(max_tokens=300, ignore_eos=True)


class Answer:
    """What came back for one request; at_event: called for each event first."""

    def __init__(self, at_event: Callable[[], object] = lambda: None) -> None:
        self.at_event = at_event
        self.events: list[Event] = []
        self.done = threading.Event()
        self.seen: Queue[Event] = Queue()
        self.sequence: EngineSequence | None = None

    def __call__(self, event: Event) -> None:
        self.at_event()
        self.events.append(event)
        self.seen.put(event)
        if isinstance(event, Failed) or (isinstance(event, Finished) and event.last):
            self.done.set()

    def wait(self) -> Answer:
        assert self.done.wait(120)
        return self

    def begun(self) -> Answer:
        """Wait for the next text."""
        while not isinstance(self.seen.get(timeout=60), Output):
            pass
        return self

    @property
    def outputs(self) -> list[Output]:
        return [event for event in self.events if isinstance(event, Output)]

    @property
    def tokens(self) -> list[int]:
        return [token.id for output in self.outputs for token in output.tokens]

    def tokens_of(self, answer: int) -> list[int]:
        return [token.id for output in self.outputs if output.answer == answer for token in output.tokens]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def first(self) -> Token:
        return self.outputs[0].tokens[0]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def end_reason(self) -> EndReason:
        assert isinstance(self.last, Finished), self.last
        return self.last.reason

    @property
    def started(self) -> Started:
        assert isinstance(self.events[0], Started), self.events[0]
        return self.events[0]

    @property
    def figures(self) -> Figures:
        return self.started.figures

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.started.sources


class Held:
    """An answer with which the engine stands still, until it is let go on to the next token or altogether."""

    def __init__(self, engine: EmbeddedEngine, layout: PromptLayout, sampling: Sampling = LONG, **more: object) -> None:
        self._stands, self._goes_on, self._free = threading.Semaphore(0), threading.Semaphore(0), False
        self.answer = Answer(self._stand)
        engine.submit(make_prompt(layout, sampling=sampling, **more), self.answer)
        assert self._stands.acquire(timeout=60)

    def _stand(self) -> None:
        if self.answer.tokens and not self._free:
            self._stands.release()
            assert self._goes_on.acquire(timeout=60)

    def step(self) -> None:
        self._goes_on.release()
        assert self._stands.acquire(timeout=60)

    def let_go(self) -> None:
        self._free = True
        self._goes_on.release()


def make_prompt(layout: PromptLayout, **more: object) -> Prompt:
    """A prompt. more: fields of it, and of its request."""
    of_prompt = {field.name for field in fields(Prompt)} - {"sampling"}
    of_request = {name: value for name, value in more.items() if name not in of_prompt}
    given = {name: value for name, value in more.items() if name in of_prompt}
    return replace(Prompt.of(layout, **of_request), **given)  # type: ignore[arg-type]


def ask(
    engine: EmbeddedEngine,
    layout: PromptLayout,
    sampling: Sampling = FEW,
    *,
    at_event: Callable[[], object] = lambda: None,
    **more: object,
) -> Answer:
    answer = Answer(at_event)
    answer.sequence = engine.submit(make_prompt(layout, sampling=sampling, **more), answer)
    return answer


def passes_of(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each request in each pass from now on."""
    passes, prefill = list[list[int]](), engine.decoder.prefill

    def counted(requests: Sequence[RowRequest], **more: Any) -> torch.Tensor:
        passes.append([int(request.positions.shape[0]) for request in requests])
        return prefill(requests, **more)

    monkeypatch.setattr(engine.decoder, "prefill", counted)
    return passes


def layouts(count: int) -> list[PromptLayout]:
    """Prompts of several lengths with the same prefix; every other one uses chunks of the one before, in another order."""
    first = make_layout()
    found = []
    for number in range(count):
        other = make_layout(chunks=(9 + number, 17, 5), suffix=3 + number % 5, seed=number + 2)
        chunks = (*other.chunks[:2], *reversed(first.chunks)) if number % 2 else (*first.chunks[1:], *other.chunks)
        found.append(PromptLayout.of_chunks(first.prefix, chunks, other.suffix))
    return found


def alone(blender: Blender, layout: PromptLayout, sampling: Sampling = FEW) -> list[int]:
    blend = blender.prefill(layout)
    return list(generate(blender.decoder, blend, layout.token_ids, max_new_tokens=sampling.max_tokens).token_ids)
