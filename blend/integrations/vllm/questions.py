"""The part of a request's body that decides about its prompt -> what the service is asked.

The same fields in the same words as those of `blend serve`; all others are vLLM's and never come here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blend.serve.http.bodies import ChatBody, CompletionBody, ModelNames, read_body, request_of
from blend.serve.limits import RequestLimits
from blend.serve.types import Request

CORPUS = "+corpus"  # behind a model's name, and a name of a corpus behind that
_OURS = ("messages", "prompt", "documents", "kvblend", "model")


def part_of(body: Mapping[str, Any], template: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Of a body that vLLM's server was sent, what is to be blended by.

    template: arguments of the chat template that the server has by default. As in vLLM, one that a request leaves open with
    None or "auto" is the server's.
    """
    part = {name: body[name] for name in _OURS if body.get(name) is not None}
    tools = {"tools": body["tools"]} if body.get("tools") else {}
    given = body.get("chat_template_kwargs")
    given = given if isinstance(given, dict) else {}  # anything else is refused by vLLM
    if template:
        given = {**template, **{name: value for name, value in given.items() if value not in (None, "auto")}}
    return {**part, "template": {**given, **tools}}


def wants_context(body: Mapping[str, Any]) -> bool:
    """Whether a request asks for what only kvblend does: documents, a corpus, or a field of ours."""
    return bool(body.get("documents")) or body.get("kvblend") is not None or CORPUS in str(body.get("model", ""))


def answer_request(part: Mapping[str, Any], corpora: tuple[str, ...], limits: RequestLimits) -> Request:
    """What the service is asked. corpora: that there are. Raises `ApiError` for whatever is wrong with it."""
    values = dict(part)
    template = values.pop("template", {})
    model = str(values.get("model", ""))
    raw = json.dumps(values).encode()
    body = read_body(raw, CompletionBody, limits) if "prompt" in values else read_body(raw, ChatBody, limits)
    request = request_of(body, ModelNames(plain_model(model) or model, "", corpora), limits)
    return replace(request, template=template)


def plain_model(model: str) -> str:
    """The name of the model itself, without a corpus that it names."""
    return model.partition(CORPUS)[0]
