"""Prompts of requests to vLLM's server: what kvblend takes out of a body, the prompt it makes, and what it puts back.

Fields and words are those of `blend serve`. All other fields are vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blend.config import CorpusConfig
from blend.errors import StoreError
from blend.integrations.vllm.contract import LayoutTicket, Signer, encoded
from blend.integrations.vllm.salts import ConversationSalts
from blend.serve.failures import STORE_UNREACHABLE
from blend.serve.http.bodies import END_USER, CompletionBody, read_body
from blend.serve.http.chat import ChatBody
from blend.serve.http.questions import CORPUS, ModelNames, requests_of
from blend.serve.limits import RequestLimits
from blend.serve.request import Request

if TYPE_CHECKING:
    from blend.serve.prompt import Cited
    from blend.serve.prompts.tenant import TenantState

BOOK = "learned-rows.sqlite"
"""The list of what workers have learned, in the store."""
CORPUS_OPTIONS = frozenset({"chunk_tokens", "codec", "embedder", "top_k"})
"""Options of the connector that are entries of `CorpusConfig`."""
_OF_TOOLS = ("tool_calls", "tool_call_id", "name")
_OURS = ("messages", "prompt", "documents", "kvblend", "model", *END_USER)
_OTHER_PROMPTS = (
    *("continue_final_message", "chat_template", "echo", "prompt_logprobs", "mm_processor_kwargs", "suffix"),
    *("prompt_embeds", "truncate_prompt_tokens", "reasoning_effort", "use_beam_search"),
)
"""Fields with which vLLM makes another prompt, needs all of its rows, or loses our ticket."""


def part_of(body: Mapping[str, Any], template: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a body that decide about its prompt.

    template: the server's default arguments of the chat template. As in vLLM, they fill what a request leaves at None or
    "auto".
    """
    part = {name: body[name] for name in _OURS if body.get(name) is not None}
    arguments = body.get("chat_template_kwargs")
    if not isinstance(arguments, dict):  # refused by vLLM
        arguments = {}
    if template:
        arguments = {**template, **{name: value for name, value in arguments.items() if value not in (None, "auto")}}
    tools = {"tools": body["tools"]} if body.get("tools") else {}
    return {**part, "template": {**arguments, **tools}}


def wants_context(body: Mapping[str, Any]) -> bool:
    """Whether a request uses kvblend's fields: documents, a corpus, or `kvblend`."""
    return bool(body.get("documents")) or body.get("kvblend") is not None or CORPUS in str(body.get("model", ""))


def answer_request(part: Mapping[str, Any], corpora: tuple[str, ...], limits: RequestLimits) -> Request:
    """The request for kvblend's service. corpora: names of those that exist. Raises `ApiError` for a wrong one."""
    values = dict(part)
    template = values.pop("template", {})
    model = str(values.get("model", ""))
    raw = json.dumps(values).encode()
    body = read_body(raw, CompletionBody if "prompt" in values else ChatBody)
    [request] = requests_of(body, ModelNames(plain_model(model) or model, "", corpora), limits)
    return replace(request, template=template)


def plain_model(model: str) -> str:
    """The model's name without a corpus."""
    return model.partition(CORPUS)[0]


def another_prompt(body: Mapping[str, Any], path: str) -> str:
    """The field because of which kvblend cannot make this request's prompt, or ""."""
    for name in _OTHER_PROMPTS:
        if body.get(name) is not None and body[name] is not False:
            return name
    if body.get("add_generation_prompt") is False:
        return "add_generation_prompt"
    if body.get("tools") and body.get("tool_choice") == "none":
        return "tool_choice"
    if is_chat(path):
        messages = body.get("messages")
        return "" if isinstance(messages, list) and all(map(_is_text, messages)) else "messages"
    return "" if isinstance(body.get("prompt"), str) else "prompt"


def is_chat(path: str) -> bool:
    """Whether a request has messages, and not a prompt."""
    return path.endswith("/chat/completions")


def _is_text(message: Any) -> bool:
    roles = ("system", "developer", "user", "assistant", "tool")
    if not isinstance(message, dict) or message.get("role") not in roles:
        return False
    if any(value for name, value in message.items() if name not in ("role", "content", *_OF_TOOLS)):
        return False
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return True
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )


def plain_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without kvblend's fields."""
    plain = {name: value for name, value in body.items() if name not in ("documents", "kvblend")}
    if isinstance(body.get("model"), str):
        plain["model"] = plain_model(body["model"])
    return plain


def with_ids(body: Mapping[str, Any], ids: list[int], path: str) -> dict[str, Any]:
    """The body with a prompt of these token ids."""
    if is_chat(path):
        return {**body, "kv_transfer_params": {"prompt_token_ids": ids}}
    return {**body, "prompt": ids}


def blended(
    body: Mapping[str, Any],
    ids: list[int],
    ready: Mapping[str, str],
    path: str,
    signer: Signer,
) -> dict[str, Any]:
    """The body with a prompt of these token ids and a signed ticket for its KV.

    Args:
        body: the client's, without kvblend's fields.
        ids: token ids of the prompt.
        ready: the ticket, and a salt. The salt keeps the blended blocks from other requests in vLLM's prefix cache.
        path: of the request.
        signer: signs the ticket.
    """
    salt = sha256(encoded(f"{ready['salt']}/{body.get('cache_salt') or ''}")).hexdigest()
    rewritten = with_ids(body, ids, path)
    transfer = {**rewritten.get("kv_transfer_params", {}), **signer.signed(ready["ticket"], salt)}
    return {**rewritten, "cache_salt": salt, "kv_transfer_params": transfer}


def corpus_config(options: Mapping[str, Any]) -> CorpusConfig:
    """Of the connector's options. Raises `ConfigError`."""
    return CorpusConfig(**{name: options[name] for name in CORPUS_OPTIONS & set(options)})


class PromptForVLLM(NamedTuple):
    """A prompt with passages.

    shown: for the reply's field `kvblend`. ready: ticket and salt of its blend; without them vLLM computes it.
    """

    ids: list[int]
    shown: dict[str, Any]
    ready: Mapping[str, str] | None = None


def unblended(ids: list[int], sources: list[dict[str, Any]], reason: str) -> PromptForVLLM:
    """A prompt with its passages that vLLM computes, and why."""
    return PromptForVLLM(ids, {"sources": sources, "figures": {"method": "full", "reason": reason}})


class _Reader(NamedTuple):
    """As much of a decoder as putting documents into a prompt takes. Models with recurrent layers are refused elsewhere."""

    tokenizer: Any
    context_length: int | None = None
    recurrent: tuple[int, ...] = ()
    operator_rows: float = 0.0


class LocalPrompts:
    """Makes prompts in vLLM's own server. Threads may share it. tokenizer: vLLM's. options: the connector's."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._tenant: TenantState | None = None
        self._salts = ConversationSalts()

    def prompt(self, part: Mapping[str, Any]) -> PromptForVLLM | None:
        """The prompt of a `part_of` a body; None without passages. Raises `ApiError`, `BlendError`, `RetrievalError`."""
        from blend.serve.prompts.build import build_prompt

        tenant = self._opened()
        reason, generation = _reason(tenant)
        limits = RequestLimits(top_k=tenant.rag().corpus_config.top_k)
        request = answer_request(part, tenant.corpora, limits)
        prompt = build_prompt(tenant, request)
        if not prompt.cited:
            return None
        ids = list(prompt.layout.token_ids)
        sources = [source_of(passage) for passage in prompt.cited]
        if request.method == "full":
            return unblended(ids, sources, "")
        if reason:
            return unblended(ids, sources, reason)
        ticket = LayoutTicket(prompt.layout, prompt.corpus, request.quality, request.user)
        ready = {"ticket": ticket.ticket(), "salt": self._salts.salt(ticket, generation)}
        return PromptForVLLM(ids, {"sources": sources, "figures": {"method": "rows"}}, ready)

    def _opened(self) -> TenantState:
        if self._tenant is None:
            from blend.rag import Rag
            from blend.serve.prompts.tenant import TenantState

            options = self._options
            reader = cast(Any, _Reader(self._tokenizer))
            rag = Rag(options["store"], decoder=reader, corpus=corpus_config(options))
            if "embedder" not in options:
                rag.take_embedder_of_index()
            learned_by = rag.root / BOOK if options.get("learn", True) else None
            self._tenant = TenantState(rag, 0, learned_by=learned_by)
        return self._tenant


def _reason(tenant: TenantState) -> tuple[str, str]:
    """Why nothing can be blended now, and otherwise the store's generation, before anything of it is read."""
    if tenant.watch.reachable():
        with suppress(StoreError):
            return "", tenant.rag().store.generation
    return STORE_UNREACHABLE, ""


def source_of(passage: Cited) -> dict[str, Any]:
    """A passage in the words of `blend serve`, without `hit`, which is known later."""
    source = passage.source(hit=False)._asdict()
    del source["hit"]
    return source
