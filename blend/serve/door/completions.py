"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from blend.serve.door import body as bodies
from blend.serve.door.answers import Answer, ChatAnswer, TextAnswer
from blend.serve.door.auth import admitted
from blend.serve.door.errors import DoorError, Failure, json_response
from blend.serve.door.hall import Hall, hall_of
from blend.serve.door.log import Entry, entry_of
from blend.serve.door.parsing import OF_A_CORPUS, Offered, read_body, request_of
from blend.serve.door.schemas import ChatBody, CompletionBody
from blend.serve.door.stream import Conversation, EventStream, collected, failed

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
    raw = await bodies.read(request, hall.limits.body_bytes, hall.limits.body_s)
    trace = hall.tracing.begin(entry.id, request.headers, entry.begun) if hall.tracing else None
    conversation = Conversation(request.receive, hall.metrics, entry, trace)
    try:
        body = await to_thread.run_sync(_submit, raw, kind, service, hall, tenant, conversation, limiter=hall.questions)
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


def _submit(
    raw: bytes,
    kind: type[ChatBody] | type[CompletionBody],
    service: Service,
    hall: Hall,
    tenant: str,
    conversation: Conversation,
) -> Body:
    """Read, check and hand over, in a worker thread: all of it may take a while."""
    body = read_body(raw, kind, hall.limits)
    try:
        request = request_of(body, Offered(service.model, tenant, service.corpora(tenant)), hall.limits)
    except DoorError as error:
        if error.failure.code in OF_A_CORPUS:  # which there are is not known while the store cannot be read
            service.require_store(tenant)
        raise
    conversation.took(service.submit(request, conversation.reply))
    return body


async def _stream(body: Body, conversation: Conversation, answer: Answer, hall: Hall, entry: Entry) -> Response:
    """A stream, once there is something to say: until then a failure still has a status of its own."""
    first = await conversation.next(hall.limits.keep_alive_s)
    if first is not None and (failure := failed(first)):
        raise DoorError(failure)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return EventStream(conversation, first, answer, entry, keep_alive_s=hall.limits.keep_alive_s, usage=usage)
