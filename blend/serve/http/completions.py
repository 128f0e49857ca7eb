"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from anyio import to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from blend.serve.http.bodies import (
    CORPUS_CODES,
    ChatBody,
    CompletionBody,
    ModelNames,
    StreamOptions,
    read_body,
    request_of,
)
from blend.serve.http.errors import ApiError, Failure, json_response
from blend.serve.http.log import LogEntry, entry_of
from blend.serve.http.replies import ChatReply, EventChannel, EventStream, Reply, TextReply, failure_in
from blend.serve.http.state import AppState, admitted, limited, receive_all, state_of
from blend.serve.types import QueueFullError

if TYPE_CHECKING:
    from blend.serve.service import Service

Body = ChatBody | CompletionBody


async def chat(request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await _answer(request, ChatBody)


async def text(request: HttpRequest) -> Response:
    """Continue a text."""
    return await _answer(request, CompletionBody)


async def _answer(request: HttpRequest, kind: type[Body]) -> Response:
    state, tenant, entry = state_of(request), admitted(request), entry_of(request)
    service = state.require_service()
    body, channel = await _accept(request, kind, service, tenant)
    try:
        reply_kind = ChatReply if isinstance(body, ChatBody) else TextReply
        reply = reply_kind(body.model or service.model, logprobs=body.wanted_logprobs is not None)
        if body.stream:
            return await _stream(body, channel, reply, state, entry)
        found = await channel.collect()
    except BaseException:
        channel.close()
        raise
    channel.close()
    if isinstance(found, Failure):
        raise ApiError(found)
    return json_response(reply.whole(*found))


async def _accept(request: HttpRequest, kind: type[Body], service: Service, tenant: str) -> tuple[Body, EventChannel]:
    """Receive a question and submit it. Its body counts towards the budget until it is a prompt."""
    state, entry = state_of(request), entry_of(request)
    with limited(request, state.limits.body_bytes, state.limits.body_s, state.bodies) as receive:
        raw = await receive_all(receive)
        trace = state.tracing.begin(entry.id, request.headers, entry.begun) if state.tracing else None
        channel = EventChannel(request.receive, state.metrics, entry, trace)
        submit = partial(_submit, raw, kind, service, state, tenant, channel)
        try:
            async with state.share(tenant):
                return await to_thread.run_sync(submit, limiter=state.questions), channel
        except BaseException:
            channel.close()
            raise


def _submit(
    raw: bytes, kind: type[Body], service: Service, state: AppState, tenant: str, channel: EventChannel
) -> Body:
    """Parse, check and submit, in a worker thread: all of it may take a while."""
    state.require_service()  # the body may have taken a while
    channel.require()
    body = read_body(raw, kind, state.limits)
    try:
        request = request_of(body, ModelNames(service.model, tenant, service.corpora(tenant)), state.limits)
    except ApiError as error:
        if error.failure.code in CORPUS_CODES:  # which corpora exist is unknown while the store is unreachable
            service.require_store(tenant)
        raise
    request = replace(request, arrived=channel.begun)
    try:
        channel.accepted(service.submit(request, channel.send, partial(channel.require, request.deadline_s)))
    except QueueFullError:
        state.require_service()  # it may be closed, not full
        raise
    return body


async def _stream(body: Body, channel: EventChannel, reply: Reply, state: AppState, entry: LogEntry) -> Response:
    """Start a stream with its first event: until then a failure still has a status of its own."""
    first = await channel.next(state.limits.keep_alive_s)
    if first is not None and (failure := failure_in(first)):
        raise ApiError(failure)
    options = body.stream_options or StreamOptions()
    usage: Literal["last", "every"] | None = None
    if options.include_usage:
        usage = "every" if options.continuous_usage_stats else "last"
    return EventStream(channel, first, reply, entry, keep_alive_s=state.limits.keep_alive_s, usage=usage)
