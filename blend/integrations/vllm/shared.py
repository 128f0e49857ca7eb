"""Text that several prompts bring while they are loaded: the first load computes its caches, apart from its own prompt.

The middleware compares requests in flight, and says in their tickets which of their text others bring, too. So the first load
computes text for loads that have not reached this worker yet. Loads in the queue are compared with one another, too: several
servers may stand in front of one engine.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from blend.config import BlendConfig
from blend.errors import first_line
from blend.integrations.vllm.contract import OutageLog
from blend.integrations.vllm.decoder import PagedDecoder, Passes, Pause
from blend.integrations.vllm.scheduler import Load
from blend.layout import PromptLayout, Tokens
from blend.model.passes import RowRequest, Steps
from blend.prefill.blender import Blend, Blender
from blend.serve.engine.background import IOPool, Stepper
from blend.serve.engine.savings import LEAST_GAIN
from blend.serve.engine.shared_text import SharedText, brought, with_learned
from blend.serve.flights import Flight, Flights
from blend.serve.prompt import Prompt
from blend.serve.prompts.learned import LearnedCaches
from blend.serve.request import RequestOrigin
from blend.serve.token_index import digest_of

LOADING = 4  # threads, of which a store that hangs takes one for each text that it holds up
OWNERS_PATIENCE = 4
"""For how many times computing its shared text takes, an owner waits for the store. The others wait for one.

It has computed the text, and what the others run meanwhile slows its store down.
"""


class LoadText(NamedTuple):
    """A load's prompt, whose shared text is learned text.

    Attributes:
        texts: those that others have had learned since its ticket was made, or that it has.
        rows_ahead: that it has computed for all.

    """

    layout: PromptLayout
    texts: frozenset[Tokens] = frozenset()
    rows_ahead: int = 0

    def rows_shared(self, blend: Blend[PagedDecoder]) -> int:
        """Rows of its prompt that came from these caches."""
        pairs = zip(blend.layout.places, blend.hits, strict=True)
        return sum(len(place.tokens) for place, is_hit in pairs if is_hit and place.stored in self.texts)


class SharedLoads:
    """Finds what loads share, and computes it once. The engine's thread calls it, alike in all workers of a model.

    The first worker decides and stores; all compute the same rows.

    Args:
        learned: which caches of clients' texts are stored; None stores none, and nothing is shared.

    Attributes:
        news: set when a thread has done something for a load.

    """

    def __init__(self, decoder: PagedDecoder, learned: LearnedCaches | None) -> None:
        self._decoder = decoder
        self._learned = learned
        self._flights = Flights(self._seconds)
        self._row_s: float | None = None
        self.news = threading.Event()
        self._io = IOPool("kvblend-shared", LOADING, self.news.set)
        self._outage = OutageLog()

    def begin(self, load: Load) -> Flight:
        """Compare a load that has come with those that wait. Text is shared where its caches are the same."""
        ticket = load.ticket
        layout = ticket.layout
        counts = zip(layout.places, ticket.awaited, strict=False)
        announced = {digest_of(place.whole): count for place, count in counts if count}
        texts = {place.whole for place in layout.places if place.is_brought}
        whose = repr((ticket.user, ticket.corpus, layout.kept_behind))
        flight = self._flights.begin(whose, texts if self._learned is not None else (), announced=announced)
        assert flight is not None  # no number was given that could be old
        return flight

    def passes(
        self, load: Load, flight: Flight, blender: Blender[PagedDecoder], config: BlendConfig
    ) -> Passes[LoadText]:
        """The load's prompt, once the text that others bring, too, is stored. Computes what is missing of it, pass by pass.

        The ticket may be older than what another prompt had learned: such text is learned text now. If the store stalls the
        load for too long, the prompt goes on with what is stored.
        """
        layout = load.ticket.layout
        if self._learned is None:
            return LoadText(layout)
        workers = self._decoder.model.workers
        is_first = self._decoder.is_first
        # The first one alone divides texts, and finds what their parts have in common.
        beginning: tuple[LoadText, bool] | None = None
        if is_first:
            beginning = (self._as_learned(load, layout), bool(flight.joined))
        beginning = workers.from_first(beginning)
        assert beginning is not None
        text, joined = beginning
        if not joined:
            return text
        layout = text.layout
        shared = self._shared_text(load, layout, flight, blender, config) if is_first else None
        stepper = Stepper(self._steps(load, layout, shared), self._io) if shared is not None else None
        try:
            while True:
                self.news.clear()
                request = self._decoder.from_first(stepper.rows() if stepper is not None else None)
                if request is not None:
                    self._run(request, stepper)
                    yield Pause.PASS
                    continue
                result: LoadText | None = None
                if stepper is not None and stepper.ended and not stepper.busy:
                    result = stepper.result
                elif stepper is not None and shared is not None and flight.is_overdue(flight.shared, OWNERS_PATIENCE):
                    self._outage.failed(
                        "kvblend: the store takes text that prompts share too slowly; they go on without it"
                    )
                    result = self._as_learned(load, layout)._replace(rows_ahead=shared.rows_computed)
                result = workers.from_first(result)
                if result is not None:
                    return result
                yield Pause.STORE
        finally:
            if stepper is not None:
                stepper.give_up()

    def _shared_text(
        self, load: Load, layout: PromptLayout, flight: Flight, blender: Blender[PagedDecoder], config: BlendConfig
    ) -> SharedText:
        assert self._learned is not None
        learn = partial(self._learned.admitted, origin=RequestOrigin(load.ticket.user))
        prompt = replace(Prompt.of(layout), flight=flight, learn=learn)
        return SharedText(prompt, blender, config, LEAST_GAIN)

    def _steps(self, load: Load, layout: PromptLayout, shared: SharedText) -> Steps[LoadText]:
        """Compute and store the shared text. If the store fails, or a pass, the prompt computes its text itself."""
        most_rows = self._decoder.most_rows
        try:
            layout = yield from shared.steps(layout, load.start, lambda: most_rows)
        except Exception as error:  # what is stored serves; the prompt computes the rest itself
            self._outage.failed("kvblend: text that prompts share could not be stored: %s", first_line(error))
        else:
            self._outage.works()
        return self._as_learned(load, layout)._replace(rows_ahead=shared.rows_computed)

    def _seconds(self, rows: int) -> float | None:
        """How long a prompt would take to compute so many rows itself, by the last text; None before the first one."""
        return None if self._row_s is None else self._row_s * rows

    def _run(self, request: RowRequest, stepper: Stepper[LoadText] | None) -> None:
        """Run rows in this worker. If that fails in the first one, its steps hear of it."""
        if stepper is None:
            self._decoder.run_rows(request)
            return
        begun = time.monotonic()
        try:
            self._decoder.run_rows(request)
        except Exception as error:
            stepper.failed(error)
            return
        stepper.took(torch.empty((1, 0)))  # logits of a text are not used
        self._row_s = (time.monotonic() - begun) / max(1, request.positions.shape[0])

    def _as_learned(self, load: Load, layout: PromptLayout) -> LoadText:
        """The prompt, in which all is learned text that its end user has had learned by now. layout: in these pieces."""
        assert self._learned is not None
        index = self._learned.index(load.ticket.user)
        layout = with_learned(layout, [text for text in brought(layout) if digest_of(text) in index])
        texts = {place.stored for place in layout.places} - {place.stored for place in load.ticket.layout.places}
        return LoadText(layout, frozenset(filter(None, texts)))

    def close(self) -> None:
        """End its thread."""
        self._io.close()
