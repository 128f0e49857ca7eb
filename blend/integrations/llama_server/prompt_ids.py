"""The token ids of a request's prompt, as llama-server will compute them. Nothing is guessed: llama-server gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from blend.integrations.llama_server.upstream import Upstream, UpstreamError

_CHATS = ("/v1/chat/completions", "/chat/completions")
_TEXTS = ("/v1/completions", "/completions", "/completion")
PATHS = (*_CHATS, *_TEXTS, "/v1/messages", "/v1/responses", "/responses", "/infill")
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
        prompt = await upstream.apply_template(body, headers) if path in _CHATS else _text_of(body)
        if prompt is None:
            return ReadPrompt(reason="the request has several prompts")
        if isinstance(prompt, str) and any(marker and marker in prompt for marker in (media, _MEDIA)):
            return ReadPrompt(reason="the prompt has pictures or sound")
        return ReadPrompt(await upstream.tokenize(prompt, headers))
    except UpstreamError:  # llama-server says why to the client
        return ReadPrompt(reason="llama-server gives no prompt")
    except (LookupError, TypeError, ValueError):
        return ReadPrompt(reason="llama-server gives the prompt in an unknown form")


def _reason_against(path: str, body: Mapping[str, Any] | None) -> str:
    if body is None:
        return "the body is no JSON object"
    if path not in (*_CHATS, *_TEXTS):
        return f"prompts of {path} are not looked at"
    choice = next((name for name in _OWN_CHOICES if body.get(name) is not None), "")
    if choice:
        return f"the request has {choice}"
    return "the request has cache_prompt: false" if body.get("cache_prompt") is False else ""


def _text_of(body: Mapping[str, Any]) -> Any:
    """A completion's prompt: a text, or a list of token ids and texts. None if there are several, or none."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and any(isinstance(part, int) for part in prompt):
        return prompt if all(isinstance(part, (int, str)) for part in prompt) else None
    return None
