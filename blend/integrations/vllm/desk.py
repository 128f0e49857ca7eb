"""A question from vLLM's server on its way through the prefill process: put into a prompt, blended, and held for vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from blend.errors import PromptError
from blend.integrations.vllm.local import told_of
from blend.integrations.vllm.metrics import PrefillMetrics
from blend.integrations.vllm.questions import answer_request
from blend.integrations.vllm.shelf import NoRoomError, Shelf
from blend.integrations.vllm.wire import Message
from blend.serve.failures import LOG, log_error
from blend.serve.http.errors import failure_of
from blend.serve.http.replies import figures_of
from blend.serve.limits import RequestLimits
from blend.serve.store_metrics import StoreFigures
from blend.serve.types import Event, Failed, Finished, Handle, QueueFullError, Request, Sampling, Started

if TYPE_CHECKING:
    from blend.blender import Blend
    from blend.rag import Rag
    from blend.serve.service import Service
    from blend.types import PromptLayout

CHECKED_ROWS = (33, 150, 190)  # of the prompts by which a model is compared with vLLM's

TOO_LONG = "too long"
"""Why a prompt is never blended: its KV alone is more than may be held."""

Tell = Callable[[Message], None]


class Desk:
    """Takes questions for `service`, and puts what was blended on `shelf`. Threads may share it.

    metrics: what came of them. model: names the model and the dtype that it computes in. refused: why vLLM's server does not
    use their KV, "" while it does.
    """

    def __init__(
        self,
        service: Service,
        shelf: Shelf,
        limits: RequestLimits | None = None,
        metrics: PrefillMetrics | None = None,
    ) -> None:
        self.service, self.shelf, self._limits = service, shelf, limits or RequestLimits()
        self.metrics = metrics or PrefillMetrics()
        decoder = service.tenant("").rag().decoder
        self._decoder, self.model, self.refused = decoder, f"{decoder.fingerprint} {decoder.dtype}", ""
        self._row_bytes = sum(layer.width for layer in decoder.rotations) * decoder.dtype.itemsize

    def ask(self, part: Mapping[str, Any], tell: Tell, refused: Mapping[str, str] | None = None) -> Question:
        """Take a question in; `part`: see `questions.part_of`. `tell` is called from other threads too.

        refused: models whose KV the asking server does not use, and why; nothing is blended with these. It is told the prompt,
        and then one of: "ready" with a ticket; "plain", for vLLM's own prefill, with what there is to say of it; "pass" where
        kvblend has no part in the prompt; "error".
        """
        question = Question(self.shelf, tell, self.metrics)
        try:
            self.service.engine.require_room()  # who is left to vLLM must not cost a search first
            prepared = self.service.prepare(answer_request(part, self.service.corpora(""), self._limits))
        except QueueFullError:
            question.give_up("busy")
            return question
        except Exception as error:
            failure = failure_of(error)
            if failure.status >= 500:
                log_error(error, "")
            self.metrics.refused(failure.code)
            tell({"error": [failure.status, failure.message, failure.code, failure.param]})
            return question
        if not prepared.cited:
            tell({"pass": True})
            return question
        sources = [told_of(one) for one in prepared.cited]
        tell({"prompt": list(prepared.layout.token_ids), "model": self.model, "sources": sources})
        if refused and self.model in refused:
            self.judge(refused[self.model])
            question.give_up("refused")
        else:
            self._blend(prepared, question)
        return question

    def judge(self, reason: str) -> None:
        """A server of vLLM's has compared: why it does not use KV of this model, or ""."""
        if reason and reason != self.refused:
            LOG.error("refused", extra={"why": reason})
        self.refused = reason

    def reason_against(self, dtype: str) -> str:
        """Why a vLLM that computes in this dtype is not to use KV of this model, or ""."""
        mine = str(self._decoder.dtype).removeprefix("torch.")
        return (
            ""
            if dtype == mine
            else f"vLLM computes in {dtype}, blend vllm in {mine}: start blend vllm with --dtype {dtype}"
        )

    def _blend(self, prepared: Request, question: Question) -> None:
        need = prepared.layout.rows * self._row_bytes
        if self.shelf.nbytes + need > self.shelf.budget:
            question.give_up("busy" if need <= self.shelf.budget else TOO_LONG)
            return
        try:
            rag = self.service.rag(prepared)
            generation = rag.store.generation  # before anything is read, so that no later one is named

            def handover(blend: Blend) -> None:
                question.hold(blend, salt_of(prepared.layout, rag, blend, generation))

            handed = replace(prepared, handover=handover, sampling=Sampling(max_tokens=1))
            question.follow(self.service.take(handed, question.on_reply))
        except QueueFullError:
            question.give_up("busy")
        except PromptError:  # more KV than --kv-budget holds
            question.give_up(TOO_LONG)
        except Exception as error:
            log_error(error, "")
            question.give_up("failed")

    def page(self) -> bytes:
        """What operators watch, in Prometheus' text format."""
        self.metrics.holds(len(self.shelf), self.shelf.nbytes, self.shelf.budget)
        return self.metrics.page(self.service.engine.stats(), StoreFigures.of(self.service.stores))

    def check(self, number: int) -> Message:
        """A prompt by which this model is compared with vLLM's: exact KV of it, and KV that is wrong.

        Tokens are random; the wrong KV is that of the same tokens in reverse. `release` gives back both tickets. Raises
        `NoRoomError`.
        """
        decoder, rows = self._decoder, CHECKED_ROWS[number]
        random = torch.Generator().manual_seed(rows)
        low, high = decoder.vocabulary // 10, decoder.vocabulary * 9 // 10  # control tokens stand at the ends
        ids = torch.randint(low, max(high, low + 2), (rows,), generator=random).tolist()
        right = self.shelf.put(self._prefilled(ids), ids)
        try:
            wrong = self.shelf.put(self._prefilled(ids[::-1]), ids)
        except Exception:
            self.shelf.release(right)
            raise
        return {"prompt": ids, "right": right, "wrong": wrong}

    def _prefilled(self, ids: list[int]) -> Any:
        decoder, rows = self._decoder, len(ids)
        cache = decoder.new_cache(rows)
        tokens = torch.tensor([ids], device=decoder.device)
        with torch.inference_mode():
            decoder.prefill_rows(tokens, torch.arange(rows, device=decoder.device), cache)
        return cache


class Question:
    """One question; `release` when nobody waits for it any more, or vLLM has finished with it."""

    def __init__(self, shelf: Shelf, tell: Tell, metrics: PrefillMetrics) -> None:
        self._shelf, self._tell, self._metrics = shelf, tell, metrics
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._ticket, self._salt, self._released, self._ended = "", "", False, False
        self._opened: Started | None = None

    def follow(self, handle: Handle) -> None:
        """The engine has it."""
        with self._lock:
            self._handle, released = handle, self._released
        if released:
            handle.cancel()

    def hold(self, blend: Blend, salt: str) -> None:
        """The blended prompt is there: hold its KV unless nobody waits for it. In the engine's thread."""
        try:
            ticket = self._shelf.put(blend.cache, blend.layout.token_ids)
        except NoRoomError:
            return  # vLLM prefills; `_close` says why
        with self._lock:
            if not self._released:
                self._ticket, self._salt = ticket, salt
                return
        self._shelf.release(ticket)

    def on_reply(self, reply: Event) -> None:
        """What the engine says."""
        if isinstance(reply, Started):
            self._opened = reply
            self._metrics.prefilled(reply)
        elif isinstance(reply, Failed):
            log_error(reply.error, "")
            self._metrics.refused(failure_of(reply.error).code)
            self.give_up("failed")
        elif isinstance(reply, Finished):
            self._close(reply)

    def _close(self, reply: Finished) -> None:
        if self._opened is None:
            self.give_up(reply.reason)
            return
        told, figures = figures_of(self._opened), self._opened.figures
        if self._ticket:
            self._metrics.handed_over(self._shelf.size(self._ticket), figures.ttft_s)
            self._end({"ready": {"ticket": self._ticket, "salt": self._salt}, "told": told})
            return
        if not figures.reason and figures.method == "blend":  # there was no room for it, or nobody waited any more
            told["figures"] |= {"method": "full", "reason": "busy"}
            self._metrics.fell_back("busy")
        self._end({"plain": told["figures"]["reason"], "told": told})

    def give_up(self, reason: str) -> None:
        """VLLM computes it all."""
        if not self._ended and reason != "cancelled":
            self._metrics.fell_back(reason)
        self._end({"plain": reason, "told": {}})

    def _end(self, message: Message) -> None:
        if not self._ended:
            self._ended = True
            self._tell(message)

    def release(self) -> None:
        """Nobody waits for it or needs it any more."""
        with self._lock:
            self._released = True
            handle, ticket = self._handle, self._ticket
            self._ticket = ""
        if handle is not None:
            handle.cancel()
        if ticket:
            self._shelf.release(ticket)


def salt_of(layout: PromptLayout, rag: Rag, blend: Blend, generation: str) -> str:
    """Names everything that a blended prompt's KV depends on, so that vLLM's prefix cache shares it with its like alone.

    Rows of the prefix are exact, computed or from memory, so they are not counted.
    """
    recomputed = int((blend.selection.rows >= len(layout.prefix)).sum())
    told = [
        (
            layout.prefix,
            layout.chunks,
            layout.suffix,
            sorted(layout.plain),
            sorted(layout.parts.items()),
            layout.canonical_prefix,
        ),
        (
            rag.corpus_config.name,
            rag.blender.config.plain(),
            generation,
            rag.decoder.identity(layout.kept_behind).namespace,
        ),
        (blend.hits, recomputed, blend.notes),
    ]
    return sha256(json.dumps(told).encode()).hexdigest()
