"""Prompts of requests to vLLM's server: what kvblend takes out of a body, the prompt it makes, and what it puts back.

Fields and words are those of `blend serve`. All other fields are vLLM's.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blend.errors import StoreError
from blend.integrations.vllm.contract import BOOK, LayoutTicket, Options, Signer
from blend.serve.engine.shared_text import brought, divided
from blend.serve.failures import STORE_UNREACHABLE
from blend.serve.flights import Flight, Flights
from blend.serve.http.bodies import END_USER, CompletionBody, read_body
from blend.serve.http.chat import ChatBody
from blend.serve.http.to_requests import CORPUS, ModelNames, requests_of
from blend.serve.limits import RequestLimits
from blend.serve.request import Request
from blend.serve.token_index import digest_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from blend.serve.prompts.tenant import TenantState

MOST_PROMPTS = 4096  # whose salts are remembered
CHAT = "/v1/chat/completions"
_OURS = ("messages", "prompt", "documents", "kvblend", "model", *END_USER)
_OTHER_PROMPTS = (
    *("continue_final_message", "chat_template", "echo", "prompt_logprobs", "mm_processor_kwargs", "suffix"),
    *("prompt_embeds", "truncate_prompt_tokens", "reasoning_effort", "use_beam_search"),
)
"""Fields with which vLLM makes another prompt, needs all of its rows, or loses our ticket."""


def wants_context(body: Mapping[str, Any]) -> bool:
    """Whether a request uses kvblend's fields: documents, a corpus, or `kvblend`."""
    return bool(body.get("documents")) or body.get("kvblend") is not None or CORPUS in str(body.get("model", ""))


def another_prompt(body: Mapping[str, Any], path: str) -> str:
    """The field because of which kvblend cannot make this request's prompt, or ""."""
    for name in _OTHER_PROMPTS:
        if body.get(name) is not None and body[name] is not False:
            return name
    if body.get("add_generation_prompt") is False:
        return "add_generation_prompt"
    if body.get("tools") and body.get("tool_choice") == "none":
        return "tool_choice"
    return "" if path == CHAT or isinstance(body.get("prompt"), str) else "prompt"


def plain_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without kvblend's fields."""
    plain = {name: value for name, value in body.items() if name not in ("documents", "kvblend")}
    if isinstance(body.get("model"), str):
        plain["model"] = body["model"].partition(CORPUS)[0]
    return plain


def request_for(
    body: Mapping[str, Any], template: Mapping[str, Any], corpora: tuple[str, ...], limits: RequestLimits
) -> Request:
    """The request for kvblend's service. Raises `ApiError` for a wrong one.

    template: as of `template_arguments`. corpora: names of those that exist.
    """
    values = {name: body[name] for name in _OURS if body.get(name) is not None}
    raw = json.dumps(values).encode()
    checked = read_body(raw, CompletionBody if "prompt" in values else ChatBody)
    model = str(values.get("model", ""))
    [request] = requests_of(checked, ModelNames(model.partition(CORPUS)[0] or model, "", corpora), limits)
    user = whose(request.user, body.get("cache_salt"))
    return replace(request, user=user, template=template_arguments(body, template))


def whose(user: str, salt: Any) -> str:
    """The end user for whom a request's text is learned. A client's own `cache_salt` keeps text apart, as it keeps blocks."""
    return json.dumps([user, salt]) if salt else user


def template_arguments(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template.

    defaults: the server's. As in vLLM, they fill what a request leaves at None or "auto".
    """
    arguments = body.get("chat_template_kwargs")
    if not isinstance(arguments, dict):  # refused by vLLM
        arguments = {}
    if defaults:
        arguments = {**defaults, **{name: value for name, value in arguments.items() if value not in (None, "auto")}}
    tools = {"tools": body["tools"]} if body.get("tools") else {}
    return {**arguments, **tools}


class PromptForVLLM(NamedTuple):
    """A prompt with passages.

    Attributes:
        shown: for the reply's field `kvblend`.
        ticket, salt: of its blend; without them vLLM computes it.
        flight: which of its text other requests bring, too, until it ends.

    """

    ids: list[int]
    shown: dict[str, Any]
    ticket: LayoutTicket | None = None
    salt: str = ""
    flight: Flight | None = None

    def compared(self) -> PromptForVLLM:
        """The prompt, whose ticket says which of its text other requests in flight bring, too."""
        flight = self.flight
        if self.ticket is None or flight is None or not flight.joined:
            return self
        layout = divided(self.ticket.layout, flight)
        flight.bring(brought(layout))
        counts = flight.awaited()
        awaited = tuple(counts[digest_of(place.whole)] if place.is_brought else 0 for place in layout.places)
        return self._replace(ticket=self.ticket._replace(layout=layout, awaited=awaited))

    def put_into(self, body: Mapping[str, Any], path: str, signer: Signer) -> dict[str, Any]:
        """A body without kvblend's fields, with these token ids and, if it is blended, a signed ticket for its KV.

        The salt keeps the blended blocks from other requests in vLLM's prefix cache.
        """
        transfer: dict[str, Any] = {}
        rewritten = {**body, "kv_transfer_params": transfer}
        if path == CHAT:
            transfer["prompt_token_ids"] = self.ids
        else:
            rewritten["prompt"] = self.ids
        if self.ticket is not None:
            salt = sha256(json.dumps([self.salt, body.get("cache_salt")]).encode()).hexdigest()
            rewritten["cache_salt"] = salt
            transfer |= signer.signed(self.ticket.text(), salt)
        return rewritten


@dataclass
class _Earlier:
    """A prompt that came before. next_turn: whether another one went on with it."""

    rows: int
    salt: str
    next_turn: bool = False


class ConversationSalts:
    """Gives the turns of a conversation one salt, so that a turn finds the blocks of those before it.

    A prompt goes on with an earlier one if it begins with all of its tokens. Rows are chosen for a question, so a prompt with
    another question gets another salt, also where two prompts go on with the same one. Threads may share it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._earlier: OrderedDict[str, _Earlier] = OrderedDict()

    def salt(self, ticket: LayoutTicket, generation: str) -> str:
        """The salt of a prompt. generation: of the store; another one is another salt."""
        setting = repr((generation, ticket.corpus, ticket.quality, ticket.user))
        rows = ticket.layout.rows
        with self._lock:
            lengths = {rows, *(prompt.rows for prompt in self._earlier.values())}
            *beginnings, name = _names(setting, ticket.layout.ids, lengths)
            if name not in self._earlier:
                before = [self._earlier[beginning] for beginning in beginnings if beginning in self._earlier]
                if before and not before[-1].next_turn:
                    before[-1].next_turn = True
                    salt = before[-1].salt
                else:
                    salt = sha256(f"rows {ticket.text()} {name}".encode()).hexdigest()
                self._earlier[name] = _Earlier(rows, salt)
            self._earlier.move_to_end(name)
            if len(self._earlier) > MOST_PROMPTS:
                self._earlier.popitem(last=False)
            return self._earlier[name].salt


def _names(setting: str, ids: NDArray[np.int64], lengths: Iterable[int]) -> Iterator[str]:
    """A name for each beginning of a prompt of these lengths, shortest first; none for lengths beyond its end."""
    digest = sha256(setting.encode())
    start = 0
    for length in sorted(lengths):
        if length > len(ids):
            return
        digest.update(ids[start:length].tobytes())
        start = length
        yield digest.copy().hexdigest()


class _Reader(NamedTuple):
    """As much of a decoder as putting documents into a prompt takes. Models with recurrent layers are refused elsewhere."""

    tokenizer: Any
    context_length: int | None = None
    recurrent: tuple[int, ...] = ()
    operator_rows: float = 0.0


class LocalPrompts:
    """Makes prompts in vLLM's own server. Threads may share it.

    tokenizer: vLLM's. template: default arguments of the chat template.
    """

    def __init__(self, tokenizer: Any, options: Options, template: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._template = template
        self._lock = Lock()
        self._tenant: TenantState | None = None
        self._salts = ConversationSalts()

    def prompt(self, body: Mapping[str, Any]) -> PromptForVLLM | None:
        """The prompt of a body; None without passages. Raises `ApiError`, `BlendError`, `RetrievalError`."""
        from blend.serve.prompts.build import build_prompt

        with self._lock:  # requests that come together are compared by one
            tenant = self._opened()
        reason = generation = ""
        try:
            tenant.watch.require()
            generation = tenant.rag().store.generation  # before anything of it is read
        except StoreError:
            reason = STORE_UNREACHABLE
        limits = RequestLimits(top_k=self._options.corpus.top_k)
        request = request_for(body, self._template, tenant.corpora, limits)
        prompt = build_prompt(tenant, request)
        if not prompt.cited:
            return None
        ids = list(prompt.layout.token_ids)
        sources = [passage.source(hit=False)._asdict() for passage in prompt.cited]
        for source in sources:
            del source["hit"]  # known later
        if reason or request.method == "full":
            return PromptForVLLM(ids, {"sources": sources, "figures": {"method": "full", "reason": reason}})
        ticket = LayoutTicket(prompt.layout, prompt.corpus, request.quality, request.user)
        shown = {"sources": sources, "figures": {"method": "rows"}}
        return PromptForVLLM(ids, shown, ticket, self._salts.salt(ticket, generation), prompt.flight)

    def _opened(self) -> TenantState:
        if self._tenant is None:
            from blend.rag import Rag
            from blend.serve.prompts.tenant import TenantState

            options = self._options
            rag = Rag(options.store, decoder=cast(Any, _Reader(self._tokenizer)), corpus=options.corpus)
            if not options.embedder:
                rag.take_embedder_of_index()
            learned_by = rag.root / BOOK if options.learn_budget else None
            self._tenant = TenantState(rag, 0, learned_by=learned_by, flights=Flights())
        return self._tenant
