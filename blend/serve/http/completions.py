"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from blend.serve.engine import QueueFullError
from blend.serve.http import body as bodies
from blend.serve.http.answers import Answer, ChatAnswer, TextAnswer
from blend.serve.http.auth import admitted
from blend.serve.http.errors import DoorError, Failure, json_response
from blend.serve.http.hall import Hall, hall_of
from blend.serve.http.log import Entry, entry_of
from blend.serve.http.parsing import OF_A_CORPUS, Offered, read_body, request_of
from blend.serve.http.schemas import ChatBody, CompletionBody, StreamOptions
from blend.serve.http.stream import Conversation, EventStream, collected, failed

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
    hall, tenant, entry = hall_of(request), admitted(request), entry_of(request)
    service = hall.open()
    body, conversation = await _taken_in(request, kind, service, tenant)
    try:
        answer = (ChatAnswer if isinstance(body, ChatBody) else TextAnswer)(
            body.model or service.model, logprobs=body.wanted_logprobs is not None
        )
        if body.stream:
            return await _stream(body, conversation, answer, hall, entry)
        found = await collected(conversation)
    except BaseException:
        conversation.close()
        raise
    conversation.close()
    if isinstance(found, Failure):
        raise DoorError(found)
    return json_response(answer.whole(*found))


async def _taken_in(
    request: Request, kind: type[ChatBody] | type[CompletionBody], service: Service, tenant: str
) -> tuple[Body, Conversation]:
    """Receive a question and hand it to the service. Its body counts as held until it is a prompt."""
    hall, entry = hall_of(request), entry_of(request)
    with bodies.limited(request, hall.limits.body_bytes, hall.limits.body_s, hall.bodies) as receive:
        raw = await bodies.read(receive)
        trace = hall.tracing.begin(entry.id, request.headers, entry.begun) if hall.tracing else None
        conversation = Conversation(request.receive, hall.metrics, entry, trace)
        given = (raw, kind, service, hall, tenant, conversation)
        try:
            async with hall.share(tenant):
                return await to_thread.run_sync(_submit, *given, limiter=hall.questions), conversation
        except BaseException:
            conversation.close()
            raise


def _submit(
    raw: bytes,
    kind: type[ChatBody] | type[CompletionBody],
    service: Service,
    hall: Hall,
    tenant: str,
    conversation: Conversation,
) -> Body:
    """Read, check and hand over, in a worker thread: all of it may take a while."""
    hall.open()  # the body may have taken a while
    conversation.require()
    body = read_body(raw, kind, hall.limits)
    try:
        request = request_of(body, Offered(service.model, tenant, service.corpora(tenant)), hall.limits)
    except DoorError as error:
        if error.failure.code in OF_A_CORPUS:  # which there are is not known while the store cannot be read
            service.require_store(tenant)
        raise
    require = partial(conversation.require, request.deadline_s)
    try:
        conversation.took(service.submit(request, conversation.reply, conversation.begun, require))
    except QueueFullError:
        hall.open()  # it may be closed rather than full
        raise
    return body


async def _stream(body: Body, conversation: Conversation, answer: Answer, hall: Hall, entry: Entry) -> Response:
    """A stream, once there is something to say: until then a failure still has a status of its own."""
    first = await conversation.next(hall.limits.keep_alive_s)
    if first is not None and (failure := failed(first)):
        raise DoorError(failure)
    options = body.stream_options or StreamOptions()
    usage: Literal["last", "every"] | None = None
    if options.include_usage:
        usage = "every" if options.continuous_usage_stats else "last"
    return EventStream(conversation, first, answer, entry, keep_alive_s=hall.limits.keep_alive_s, usage=usage)
