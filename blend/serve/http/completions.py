"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from blend.serve.http.bodies import OF_A_CORPUS, ChatBody, CompletionBody, Offered, StreamOptions, read_body, request_of
from blend.serve.http.errors import ApiError, Failure, json_response
from blend.serve.http.log import LogEntry, entry_of
from blend.serve.http.replies import Answer, ChatAnswer, Conversation, EventStream, TextAnswer, collected, failed
from blend.serve.http.state import AppState, admitted, limited, receive_all, state_of
from blend.serve.types import QueueFullError

if TYPE_CHECKING:
    from blend.serve.service import Service

Body = ChatBody | CompletionBody


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(request, ChatBody)


async def text(request: Request) -> Response:
    """Go on with a text."""
    return await _answer(request, CompletionBody)


async def _answer(request: Request, kind: type[ChatBody] | type[CompletionBody]) -> Response:
    state, tenant, entry = state_of(request), admitted(request), entry_of(request)
    service = state.require_service()
    body, conversation = await _taken_in(request, kind, service, tenant)
    try:
        answer = (ChatAnswer if isinstance(body, ChatBody) else TextAnswer)(
            body.model or service.model, logprobs=body.wanted_logprobs is not None
        )
        if body.stream:
            return await _stream(body, conversation, answer, state, entry)
        found = await collected(conversation)
    except BaseException:
        conversation.close()
        raise
    conversation.close()
    if isinstance(found, Failure):
        raise ApiError(found)
    return json_response(answer.whole(*found))


async def _taken_in(
    request: Request, kind: type[ChatBody] | type[CompletionBody], service: Service, tenant: str
) -> tuple[Body, Conversation]:
    """Receive a question and hand it to the service. Its body counts as held until it is a prompt."""
    state, entry = state_of(request), entry_of(request)
    with limited(request, state.limits.body_bytes, state.limits.body_s, state.bodies) as receive:
        raw = await receive_all(receive)
        trace = state.tracing.begin(entry.id, request.headers, entry.begun) if state.tracing else None
        conversation = Conversation(request.receive, state.metrics, entry, trace)
        given = (raw, kind, service, state, tenant, conversation)
        try:
            async with state.share(tenant):
                return await to_thread.run_sync(_submit, *given, limiter=state.questions), conversation
        except BaseException:
            conversation.close()
            raise


def _submit(
    raw: bytes,
    kind: type[ChatBody] | type[CompletionBody],
    service: Service,
    state: AppState,
    tenant: str,
    conversation: Conversation,
) -> Body:
    """Read, check and hand over, in a worker thread: all of it may take a while."""
    state.require_service()  # the body may have taken a while
    conversation.require()
    body = read_body(raw, kind, state.limits)
    try:
        request = request_of(body, Offered(service.model, tenant, service.corpora(tenant)), state.limits)
    except ApiError as error:
        if error.failure.code in OF_A_CORPUS:  # which there are is not known while the store cannot be read
            service.require_store(tenant)
        raise
    require = partial(conversation.require, request.deadline_s)
    try:
        conversation.took(service.submit(request, conversation.reply, conversation.begun, require))
    except QueueFullError:
        state.require_service()  # it may be closed rather than full
        raise
    return body


async def _stream(body: Body, conversation: Conversation, answer: Answer, state: AppState, entry: LogEntry) -> Response:
    """A stream, once there is something to say: until then a failure still has a status of its own."""
    first = await conversation.next(state.limits.keep_alive_s)
    if first is not None and (failure := failed(first)):
        raise ApiError(failure)
    options = body.stream_options or StreamOptions()
    usage: Literal["last", "every"] | None = None
    if options.include_usage:
        usage = "every" if options.continuous_usage_stats else "last"
    return EventStream(conversation, first, answer, entry, keep_alive_s=state.limits.keep_alive_s, usage=usage)
