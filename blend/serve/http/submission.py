"""From the body of a question to the engine, and back: preparation in turn with other clients, and the channel of events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from blend.errors import ContextLengthError
from blend.serve.events import Event, Failed, Finished, OnEvent, Output, QueueFullError, Started
from blend.serve.failures import log_error
from blend.serve.http.bodies import CommonBody, read_body
from blend.serve.http.errors import ApiError, ended_early, failure_of
from blend.serve.http.questions import CORPUS_CODES, ModelNames, requests_of
from blend.serve.http.requests import AppState, client_of, entry_of, state_of
from blend.serve.prompt import Prompt
from blend.serve.request import Request
from blend.serve.turns import Slices

if TYPE_CHECKING:
    from blend.serve.service import Service

BodyT = TypeVar("BodyT", bound=CommonBody)


async def submit(
    request: HttpRequest,
    kind: type[BodyT],
    service: Service,
    tenant: str,
) -> tuple[BodyT, EventChannel]:
    """Receive a question and submit it. Its body counts towards the budget until it is a prompt.

    Forms are compiled after everything else, in turns for themselves: a question without one never waits for them.
    """
    state = state_of(request)
    client = client_of(request, tenant)
    with state.bodies.receiving(request, state.limits.body_bytes, state.limits.body_s) as received:
        raw = await received.body()
        channel = EventChannel(request)
        submission = Submission(kind, service, state, tenant, channel)
        try:
            body = await state.questions.run(client, submission.prepare(raw))
            if submission.formed:
                await state.forms.run(client, submission.compile())
        except BaseException:
            channel.close()
            raise
        channel.accepted()
        return body, channel


class Submission(Generic[BodyT]):
    """Parses, checks and submits a question, in worker threads: all of it may take a while.

    formed: prompts that wait for their grammars, each with what takes its events.
    """

    def __init__(
        self,
        kind: type[BodyT],
        service: Service,
        state: AppState,
        tenant: str,
        channel: EventChannel,
    ) -> None:
        self._kind = kind
        self._service = service
        self._state = state
        self._tenant = tenant
        self._channel = channel
        self.formed = list[tuple[Prompt, OnEvent]]()

    def prepare(self, raw: bytes) -> Slices[BodyT]:
        """Prepare all prompts, and submit those without a form."""
        self._require()  # the body may have taken a while
        body = read_body(raw, self._kind, self._state.limits)
        requests = self._requests(body)
        joined = JoinedPrompts(len(requests), requests[0].sampling.n, self._channel.send)
        for number, request in enumerate(requests):
            yield
            send = partial(joined.send, number)
            request = replace(request, arrived=self._channel.begun, cancelled=self._channel.cancelled)
            with self._failures():
                self._service.engine.require_room(self._tenant)  # before the search, which would be in vain
                prompt = self._service.prepare(request, partial(self._require, request.deadline_s))
                if request.has_form:
                    self.formed.append((prompt, send))
                else:
                    self._service.take(prompt, send)
        return body

    def compile(self) -> Slices[None]:
        """Submit the prompts with a form."""
        for prompt, send in self.formed:
            with self._failures():
                require = partial(self._require, prompt.request.deadline_s)
                self._service.take(self._service.compile(prompt, require), send)
            yield

    def _requests(self, body: BodyT) -> list[Request]:
        names = ModelNames.of(self._service, self._tenant)
        try:
            requests = requests_of(body.completion(), names, self._state.limits)
            return [replace(request, marks=body.marks) for request in requests]
        except ApiError as error:
            if error.code in CORPUS_CODES:  # which corpora exist is unknown while the store is unreachable
                self._service.require_store(self._tenant)
            raise

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Name the field of a prompt that is too long, and tell a server that is closing from a full one."""
        try:
            yield
        except ContextLengthError as error:
            failure = failure_of(error)
            failure.param = self._kind.asks
            raise failure from error
        except QueueFullError:
            self._state.require_service()
            raise

    def _require(self, deadline_s: float | None = None) -> None:
        """Raise `ApiError` if the client has left, the deadline has passed or the server is closing."""
        self._state.require_service()
        self._channel.require(deadline_s)


class JoinedPrompts:
    """Joins the events of several prompts into those of one request. Threads may share it.

    prompts: how many. answers: to each; answer i to prompt p becomes answer `p * answers + i`. The first failure ends all.
    """

    def __init__(self, prompts: int, answers: int, send: OnEvent) -> None:
        self._going = prompts
        self._answers = answers
        self._send = send
        self._lock = threading.Lock()

    def send(self, prompt: int, event: Event) -> None:
        """Pass on an event of this prompt."""
        with self._lock:
            if not self._going:
                return
            if not isinstance(event, Failed):
                event = event._replace(answer=prompt * self._answers + event.answer)
            if failure_in(event):
                self._going = 0
            elif isinstance(event, Finished) and event.last:
                self._going -= 1
                event = event._replace(last=not self._going)
            self._send(event)


class EventChannel:
    """Carries the events of one request from the engine's threads to the event loop; a disconnect cancels the request.

    request: HTTP's, with its body already read. cancelled: of the service's request. `send` and `accepted` are for other
    threads; the rest is for the event loop.
    """

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._entry = entry_of(request)
        self._metrics = state_of(request).metrics
        self._tracing = state_of(request).tracing
        self.begun = time.monotonic()  # when the request came
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._started = list[Started]()
        self._tokens = Counter[int]()  # of each running answer
        self._token_at: dict[int, float] = {}
        self._watch = asyncio.create_task(self._until_disconnected(request.receive))

    def send(self, event: Event) -> None:
        """Pass an event on."""
        self._count(event)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def require(self, deadline_s: float | None = None) -> None:
        """Raise `ApiError` if the client has left or the deadline has passed."""
        if self.cancelled.is_set():
            raise ended_early("cancelled")
        if deadline_s is not None and time.monotonic() - self.begun > deadline_s:
            raise ended_early("deadline")

    def accepted(self) -> None:
        """Note that the service has accepted the request."""
        self._entry.accepted = time.monotonic()

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event, `Finished("cancelled")` when the client has left; None if none comes in `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None

    async def collect(self) -> tuple[list[Started], list[Output], list[Finished]]:
        """All answers, whole. Raises `ApiError` if they failed."""
        outputs = list[Output]()
        ends = dict[int, Finished]()
        going = True
        while going:
            event = await self._queue.get()
            if failure := failure_in(event):
                raise failure
            if isinstance(event, Output):
                outputs.append(event)
            elif isinstance(event, Finished):
                ends[event.answer] = event
                going = not event.last
        started = sorted(self._started, key=lambda prompt: prompt.answer)
        return started, outputs, [end for _, end in sorted(ends.items())]

    def close(self) -> None:
        """Cancel what has not been answered, and export the request's spans. Later calls do nothing."""
        self.cancelled.set()
        self._watch.cancel()
        if self._tracing is not None:
            entry = self._entry
            entry.outcome = entry.outcome or ("cancelled" if entry.accepted else "refused")
            entry.ended = entry.ended or time.monotonic()
            self._tracing.record(entry, self._request.headers)
            self._tracing = None

    async def _until_disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(Finished("cancelled"))
        self.cancelled.set()

    def _count(self, event: Event) -> None:
        now = time.monotonic()
        entry = self._entry
        seconds = now - self.begun
        if isinstance(event, Started):
            if not self._started:
                entry.first = now
                entry.ttft_s = seconds
                entry.figures = event.figures
            self._started.append(event)
            self._metrics.started(event, seconds)
        elif isinstance(event, Output):
            for token in event.tokens:
                if event.answer in self._token_at:
                    self._metrics.gap(token.at - self._token_at[event.answer])
                self._token_at[event.answer] = token.at
            entry.tokens += len(event.tokens)
            self._tokens[event.answer] += len(event.tokens)
        elif isinstance(event, Finished):
            entry.outcome = event.reason
            entry.ended = now
            if event.check is not None:
                self._metrics.checked(event.check)
                return
            tokens = self._tokens.total() if event.last else self._tokens.pop(event.answer)
            self._metrics.finished(event.reason, tokens, seconds)
        else:
            entry.outcome = "failed"
            entry.ended = now
            if failure_of(event.error).status >= 500:
                log_error(event.error, entry.id)


def failure_in(event: Event) -> ApiError | None:
    """The error for the client if this event ends an answer early; else None."""
    if isinstance(event, Failed):
        return failure_of(event.error)
    if isinstance(event, Finished) and event.reason not in ("stop", "length"):
        return ended_early(event.reason)
    return None
