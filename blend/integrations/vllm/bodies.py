"""Bodies of vLLM's requests: whether their prompt is ours to put together, and what is put into them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from blend.integrations.vllm.questions import plain_model
from blend.integrations.vllm.signature import Signer

_OTHER_PROMPTS = (
    *("continue_final_message", "chat_template", "echo", "prompt_logprobs", "mm_processor_kwargs", "suffix"),
    *("prompt_embeds", "truncate_prompt_tokens", "reasoning_effort", "use_beam_search"),
)
"""Fields by which vLLM makes another prompt, needs all of its rows, or loses our ticket: kvblend has no part in them."""


def another_prompt(body: Mapping[str, Any], path: str) -> str:
    """The field by which this request is not ours to put together, or ""."""
    for name in _OTHER_PROMPTS:
        if body.get(name) is not None and body[name] is not False:
            return name
    if body.get("add_generation_prompt") is False:
        return "add_generation_prompt"
    if body.get("tools") and body.get("tool_choice") == "none":
        return "tool_choice"
    if path.endswith("/chat/completions"):
        messages = body.get("messages")
        return "" if isinstance(messages, list) and all(map(_is_text, messages)) else "messages"
    return "" if isinstance(body.get("prompt"), str) else "prompt"


def _is_text(message: Any) -> bool:
    """Whether a message is one of a conversation in words."""
    if not isinstance(message, dict) or message.get("role") not in ("system", "developer", "user", "assistant"):
        return False
    if set(message) - {"role", "content"} and any(message[name] for name in set(message) - {"role", "content"}):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(
        isinstance(one, dict) and one.get("type") == "text" and isinstance(one.get("text"), str) for one in parts
    )


def plain_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Without our fields."""
    found = {name: value for name, value in body.items() if name not in ("documents", "kvblend")}
    named = {"model": plain_model(body["model"])} if isinstance(body.get("model"), str) else {}
    return {**found, **named}


def with_ids(body: Mapping[str, Any], ids: list[int], path: str) -> dict[str, Any]:
    """The same with a prompt of these tokens."""
    if path.endswith("/chat/completions"):
        return {**body, "kv_transfer_params": {"prompt_token_ids": ids}}
    return {**body, "prompt": ids}


def blended(
    body: Mapping[str, Any], ids: list[int], ready: Mapping[str, str], path: str, signer: Signer
) -> dict[str, Any]:
    """The same over blended KV, which nothing else in vLLM's prefix cache may be taken for."""
    salt = sha256(f"{ready['salt']}/{body.get('cache_salt') or ''}".encode("utf-8", "surrogatepass")).hexdigest()
    found = with_ids(body, ids, path)
    transfer = {**found.get("kv_transfer_params", {}), **signer.signed(ready["ticket"], salt)}
    return {**found, "cache_salt": salt, "kv_transfer_params": transfer}
