"""The token ids of a request's prompt, as llama-server will compute them. Nothing is guessed: llama-server gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from blend.integrations.llama_server.anthropic import as_chat
from blend.integrations.llama_server.upstream import Upstream, UpstreamError

_CHATS = ("/v1/chat/completions", "/chat/completions")
_TEXTS = ("/v1/completions", "/completions", "/completion")
_MESSAGES = "/v1/messages"
PATHS = (*_CHATS, *_TEXTS, _MESSAGES, "/v1/responses", "/responses", "/infill")
"""Paths that begin answers."""
_OWN_CHOICES = ("id_slot", "lora")  # of clients that choose a slot or adapters themselves
_MEDIA = "<__media__>"  # in prompts of versions that say no other


class ReadPrompt(NamedTuple):
    """A request's prompt. reason: why its ids are not known, or not wanted; "" if they are."""

    ids: tuple[int, ...] = ()
    reason: str = ""


async def read_prompt(
    upstream: Upstream, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], media: str = ""
) -> ReadPrompt:
    """The prompt of a request.

    Args:
        upstream: llama-server.
        path: of the request.
        body: its JSON object; None if it is none.
        headers: with the client's key.
        media: what stands for pictures and sound in prompts.

    """
    reason = _reason_against(path, body)
    if reason or body is None:
        return ReadPrompt(reason=reason)
    try:
        prompt = await _prompt_of(upstream, path, body, headers)
        if prompt is None:
            return ReadPrompt(reason="the request has several prompts, or parts that are no text")
        if isinstance(prompt, str) and any(marker and marker in prompt for marker in (media, _MEDIA)):
            return ReadPrompt(reason="the prompt has pictures or sound")
        ids = await upstream.tokenize(prompt, headers)
        if path == _MESSAGES and len(ids) != await upstream.count_messages(body, headers):
            return ReadPrompt(reason="llama-server counts other tokens")
        return ReadPrompt(ids)
    except UpstreamError:  # llama-server says why to the client
        return ReadPrompt(reason="llama-server gives no prompt")
    except (LookupError, TypeError, ValueError, AttributeError):
        return ReadPrompt(reason="the prompt has an unknown form")


async def _prompt_of(
    upstream: Upstream, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> str | list[int | str] | None:
    """A text, or a list of token ids and texts. None if there are several, or parts that are not known."""
    if path in _TEXTS:
        return _text_of(body)
    chat = as_chat(body) if path == _MESSAGES else body
    return None if chat is None else await upstream.apply_template(chat, headers)


def _reason_against(path: str, body: Mapping[str, Any] | None) -> str:
    if body is None:
        return "the body is no JSON object"
    if path not in (*_CHATS, *_TEXTS, _MESSAGES):
        return f"prompts of {path} are not looked at"
    choice = next((name for name in _OWN_CHOICES if body.get(name) is not None), "")
    if choice:
        return f"the request has {choice}"
    return "the request has cache_prompt: false" if body.get("cache_prompt") is False else ""


def _text_of(body: Mapping[str, Any]) -> str | list[int | str] | None:
    """A completion's prompt; None if there are several, or none."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and any(isinstance(part, int) for part in prompt):
        return prompt if all(isinstance(part, (int, str)) for part in prompt) else None
    return None
