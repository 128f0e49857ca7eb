"""One prompt in the engine: its prefill (`PromptPrefill`), then its answers (`Decoding`)."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from blend.errors import StoreError
from blend.model.passes import RowRequest
from blend.prefill.progress import FinalRows
from blend.select import make_selector
from blend.select.base import needs_of
from blend.serve.engine.comparison import RowComparison
from blend.serve.engine.decoding import Decoding
from blend.serve.engine.prefixes import Conversation
from blend.serve.engine.progress import ProgressLog
from blend.serve.engine.prompt_prefill import PromptPrefill
from blend.serve.engine.savings import LEAST_GAIN
from blend.serve.events import EndReason, Event, Failed, Finished, OnEvent
from blend.serve.prompt import Prompt
from blend.serve.request import Request

if TYPE_CHECKING:
    from blend.prefill.blender import Blend, Blender
    from blend.serve.engine.background import FindMissing, IOPool
    from blend.serve.engine.histories import Histories
    from blend.serve.engine.prefixes import PrefixCache


class Sequence:
    """A prompt and everything the engine holds for it. Only the engine's thread calls it.

    Args:
        prefixes: finds the prompt's beginning, and keeps its rows for later prompts.
        histories: finds the prompt that this one edits, and notes this one.
        number: order of arrival.
        least_gain: see `reason_against`.

    Attributes:
        capacity: most rows of its KV caches.
        blend: the prefilled prompt.
        piece: rows of its prefill that run next.
        answers, answers_left: answers that are being decoded, and those still to begin.
        comparison: rows to compare in idle time, once it has ended.

    """

    def __init__(
        self,
        prompt: Prompt,
        blender: Blender,
        prefixes: PrefixCache,
        histories: Histories,
        number: int,
        on_event: OnEvent,
        *,
        least_gain: int = LEAST_GAIN,
    ) -> None:
        self.prompt = prompt
        self.number = number
        self.capacity = _rows_of(prompt, blender)
        self.blend: Blend | None = None
        self.piece: RowRequest | None = None
        self.answers: list[Decoding] = []
        self.answers_left = 0
        self.ended = False
        self.comparison: RowComparison | None = None
        self._blender = blender
        self._prefixes = prefixes
        self._histories = histories
        self._least_gain = least_gain
        self._send = on_event
        self._submitted = time.monotonic()
        self._prefill: PromptPrefill | None = None  # from its first turn until its release

    @property
    def request(self) -> Request:
        """What the client asked for."""
        return self.prompt.request

    @property
    def age_s(self) -> float:
        """Seconds since it was submitted to the engine."""
        return time.monotonic() - self._submitted

    @property
    def end_reason(self) -> EndReason | None:
        """Why it must end now, or None."""
        if self.request.cancelled.is_set():
            return "cancelled"
        deadline_s = self.request.deadline_s
        late = deadline_s is not None and time.monotonic() - self.request.arrived > deadline_s
        return "deadline" if late and self.blend is None else None

    # Prefill

    @property
    def begun(self) -> bool:
        """Whether its prefill has begun."""
        return self._prefill is not None

    @property
    def waits(self) -> bool:
        """Whether its prefill waits for the store: it can neither advance nor be released."""
        return self._prefill is not None and self._prefill.busy

    def prepare(self, most_rows: int, io: IOPool) -> None:
        """Advance until a `piece` is ready, the prefill ends, or it waits for the store. most_rows: of new pieces."""
        if self._prefill is None:
            self._prefill = PromptPrefill(
                self.prompt,
                self._blender,
                self._prefixes,
                self._histories,
                io,
                submitted=self._submitted,
                least_gain=self._least_gain,
            )
            self._log = ProgressLog(self.request.id, self.prompt.layout.rows)
        self._prefill.most_rows = most_rows
        self.piece = self._prefill.rows()
        self._start_if_prefilled()

    @property
    def _begun(self) -> PromptPrefill:
        """Its prefill, which has begun."""
        assert self._prefill is not None
        return self._prefill

    def find_missing(self) -> FindMissing | None:
        """See `PromptPrefill`."""
        return self._begun.find_missing()

    def _start_if_prefilled(self) -> None:
        """Once the prompt is prefilled, report it and begin the first answer."""
        prefill = self._begun
        if prefill.busy or prefill.result is None:
            return
        prefill.let_go()
        self.blend = prefill.blend
        request = self.request
        if not request.cold:
            exact_ids = self.prompt.layout.token_ids[: prefill.exact_rows]
            self._prefixes.keep(request.tenant, exact_ids, self.blend.cache, request.origin)
        self._send(prefill.started())
        self.answers_left = self.prompt.sampling.n
        self.begin_answer()

    def begin_answer(self) -> None:
        """Take the first token of the next answer. The first one has the prompt's KV cache, the others have copies.

        A copy takes as long as a pass or longer, so the engine begins one answer a pass.
        """
        blend = self.blend
        sampling = self.prompt.sampling
        assert blend is not None
        index = sampling.n - self.answers_left
        cache = blend.cache
        if index:
            rows = self.prompt.layout.rows
            cache = cache.clone(rows + sampling.max_tokens - cache.get_seq_length())
            cache.truncate(rows)  # without those of the first answer
        self.answers_left -= 1
        decoder = self._blender.decoder
        answer = Decoding(self.prompt, decoder, index, cache, send=self._send, end=self._end_answer, fail=self.fail)
        self.answers.append(answer)
        answer.took(blend.logits)

    # Passes of its prefill: see `scheduler.BatchItem`

    def next_rows(self) -> RowRequest:
        """The piece of its prefill."""
        assert self.piece is not None
        return self.piece

    def took(self, logits: torch.Tensor) -> None:
        """Take the logits of its last row, `[1, vocab]`."""
        self.piece = None
        prefill = self._begun
        prefill.took(logits)
        self._log.update(prefill.rows_run, prefill.rows_to_run)
        self._start_if_prefilled()

    def restart(self, error: Exception) -> None:
        """Begin the prefill anew after a shared pass failed. Raises `error` if that is in vain."""
        self.piece = None
        self._begun.restart(error)

    def fail(self, error: Exception) -> None:
        """End with an error. A store error during prefill only makes more be computed."""
        prefilling = self._prefill is not None and not (self._prefill.ended or self.ended)
        if prefilling and isinstance(error, StoreError):
            self.piece = None
            self._begun.failed(error)
        else:
            self._leave_begun_rows()
            self._leave_blended_rows()
            self._close(Failed(error))

    # The end

    def end(self, reason: EndReason) -> None:
        """End all answers together and leave their rows in the prefix cache."""
        if reason == "cancelled":
            for answer in self.answers:
                self._leave_rows(answer)
        if reason != "shutdown":
            self._leave_begun_rows()
        self._close(Finished(reason))

    def _end_answer(self, answer: Decoding, reason: EndReason) -> None:
        """Report the end of one answer and leave its rows in the prefix cache."""
        self._leave_rows(answer)
        answer.ended = True
        self.answers.remove(answer)
        if self.answers or self.answers_left:
            self._send(Finished(reason, answer.index, last=False))
        else:
            self._close(Finished(reason, answer.index))

    def _leave_rows(self, answer: Decoding) -> None:
        """Keep prompt and answer for the next turn, except the last token, whose KV was never computed."""
        if not answer.tokens or self.request.cold:
            return
        prefill = self._begun
        exact = prefill.exact_rows
        tenant = self.request.tenant
        origin = self.request.origin
        prompt = self.prompt.layout.token_ids
        tokens = tuple(answer.tokens)
        conversation = Conversation(tenant, prompt, tokens, prefill.author)
        with suppress(Exception):  # only later prompts would gain
            if exact == len(prompt):
                self._prefixes.keep(tenant, (*prompt, *tokens[:-1]), answer.cache, origin)
            elif not self.request.verify:  # else the check leaves exact rows, and the next turn goes on from these
                promise = prefill.quality, prefill.estimate
                self._prefixes.keep_conversation(conversation, answer.cache, exact, *promise, origin)
            evidence = prefill.evidence(answer.cache, len(prompt) + len(tokens) - 1)
            self._histories.note(self.prompt.author, conversation, evidence, exact=exact == len(prompt), origin=origin)
            self.comparison = prefill.comparison(conversation, evidence)

    def _leave_begun_rows(self) -> None:
        """Keep what a prefill that is given up has computed: the same prompt goes on from there."""
        prefill = self._prefill
        request = self.request
        if self.ended or self.blend is not None or prefill is None or prefill.busy or request.cold:
            return
        with suppress(Exception):  # only later prompts would gain
            final = prefill.final_rows()
            if final is None:
                return
            exact = final.cache.resumable(final.exact)
            prompt = self.prompt.layout.token_ids
            self._prefixes.keep(request.tenant, prompt[:exact], final.cache, request.origin)
            self._keep_begun(final._replace(exact=exact))

    def _leave_blended_rows(self) -> None:
        """Keep the rows of a blended prompt whose answer failed: the same prompt goes on from there. Exact ones are kept."""
        blend = self.blend
        if self.ended or blend is None or self.request.cold:
            return
        with suppress(Exception):  # the device may be out of order; and only later prompts would gain
            if not bool(blend.logits.isnan().any()):  # such rows make every answer fail
                prefill = self._begun
                rows = self.prompt.layout.rows
                self._keep_begun(FinalRows(blend.cache, rows, prefill.exact_rows, prefill.estimate))

    def _keep_begun(self, final: FinalRows) -> None:
        """Keep the rows of the prompt without an answer, if some are blended."""
        request = self.request
        prefill = self._begun
        prompt = self.prompt.layout.token_ids
        rows = min(final.rows, len(prompt) - 1)
        if rows > final.exact and not request.verify:  # else the check leaves exact rows
            begun = Conversation(request.tenant, prompt, (), prefill.author)
            promise = prefill.quality, final.estimate
            self._prefixes.keep_conversation(begun, final.cache, final.exact, *promise, request.origin, rows=rows)

    def _close(self, event: Event) -> None:
        if self.ended:
            return
        self.ended = True
        for answer in self.answers:
            answer.ended = True
        try:
            self._send(event)
        except Exception as error:  # the client must not wait for an end that it never gets
            with suppress(Exception):  # a broken listener must not harm the others
                self._send(Failed(error))
        if self._prefill is not None:
            self._prefill.give_up()

    def release(self) -> None:
        """Free its KV after it ended; it must not wait for the store."""
        self.blend = self._prefill = self.piece = None
        self.answers = []


def _rows_of(prompt: Prompt, blender: Blender) -> int:
    """The most rows that its KV caches take at a time."""
    decoder = blender.decoder
    sampling = prompt.sampling
    if not decoder.copies_share_rows:
        return sampling.n * (prompt.layout.rows + sampling.max_tokens)
    rows = prompt.layout.rows
    selector = make_selector((prompt.config or blender.config).selector)
    looks_at_all = any(step.layer for step in needs_of(selector, len(decoder.rotations)).steps)
    return (2 if looks_at_all else 1) * rows + sampling.n * sampling.max_tokens
