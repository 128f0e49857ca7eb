"""Requests to `/v1/messages` as the chat completions that llama-server makes of them.

Its `server_chat_convert_anthropic_to_oai` is followed to the letter, because llama-server does not tell the prompt of such a
request. It does tell how many tokens it has: `prompt_ids` compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = dict[str, Any]

_BILLING = re.compile(r"(x-anthropic-billing-header:.*?cch=).{5}(?=;)", re.DOTALL)
_AS_THEY_ARE = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
_CHOICES = {"auto": "auto", "any": "required", "tool": "required"}


def as_chat(body: Mapping[str, Any]) -> Json | None:
    """The body of a chat completion; None if the request holds pictures or blocks that are not known.

    Raises `LookupError`, `TypeError` or `ValueError` for a body that llama-server refuses.
    """
    messages = list(_system(body.get("system")))
    for message in body["messages"]:
        converted = _converted(message)
        if converted is None:
            return None
        messages += converted
    chat: Json = {"messages": messages, "max_tokens": body.get("max_tokens", 4096)}
    if isinstance(body.get("tools"), list):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in _CHOICES:
        chat["tool_choice"] = _CHOICES[choice["type"]]
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    chat |= {name: body[name] for name in _AS_THEY_ARE if name in body}
    thinking = body.get("thinking") or {}
    if thinking.get("type") == "enabled":
        chat["thinking_budget_tokens"] = thinking.get("budget_tokens", 10000)
    return chat


def _system(system: Any) -> Iterator[Json]:
    """The system message. One number in the line that Claude Code puts in front changes with each request."""
    if system is None:
        return
    texts = [system] if isinstance(system, str) else [block["text"] for block in system if block["type"] == "text"]
    yield {"role": "system", "content": "".join(map(_without_billing, texts))}


def _without_billing(text: str) -> str:
    return _BILLING.sub(r"\1fffff", text, count=1) if text.startswith("x-anthropic-billing-header:") else text


def _tool(tool: Mapping[str, Any]) -> Json:
    function = {
        "name": tool.get("name", ""),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _converted(message: Mapping[str, Any]) -> list[Json] | None:
    """The messages that a message becomes: results of tools are messages of their own."""
    role = message.get("role", "")
    if "content" not in message and role == "assistant":
        return []
    blocks = message.get("content")
    if not isinstance(blocks, list):
        return [dict(message)]
    results = [_result(block) for block in blocks if block["type"] == "tool_result"]
    if any(result is None for result in results) or not {block["type"] for block in blocks} <= _KINDS:
        return None
    return [*_own_message(role, blocks), *filter(None, results)]


_KINDS = {"text", "thinking", "tool_use", "tool_result"}


def _own_message(role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    """What of a message's blocks stays in it."""
    texts = [block for block in blocks if block["type"] == "text"]
    thoughts = "".join(block.get("thinking", "") for block in blocks if block["type"] == "thinking")
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    if texts or calls or thoughts:
        message: Json = {"role": role, "content": texts or ""}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = thoughts
        yield message


def _call(block: Mapping[str, Any]) -> Json:
    arguments = json.dumps(block.get("input", {}), separators=(",", ":"), ensure_ascii=False)
    function = {"name": block.get("name", ""), "arguments": arguments}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> Json | None:
    """A tool's result as a message; None if it holds pictures."""
    content = block.get("content")
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            return None
        content = "".join(part.get("text", "") for part in content)
    text = content if isinstance(content, str) else ""
    return {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": text}
