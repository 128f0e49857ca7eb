"""/v1/documents: list, add, retry and delete the documents of a corpus. /v1/sessions: forget the text of one session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from blend.errors import ConfigError, first_line
from blend.serve.documents.uploads import DocumentStatus, UploadedFile, file_of
from blend.serve.http.bodies import UploadBody, read_body, session_name
from blend.serve.http.errors import Json, json_response, refuse
from blend.serve.http.state import AppState, admitted, client_of, session_of, state_of
from blend.serve.http.to_requests import digest_of_user
from blend.serve.request import GivenDocument
from blend.serve.turns import Slices
from blend.text import shown

if TYPE_CHECKING:
    from blend.serve.documents.documents import Documents

_MOST_FILES = 100
_LOOK_S = 0.05
REMOVED_S = 0.5  # how long DELETE waits until the document is out of the index; no answer uses it from the start
_FORM_FIELDS = ("file", "corpus", "text_field")

T = TypeVar("T")


Addition = tuple[str, list[UploadedFile], list[GivenDocument]]
"""The corpus that a request names, and what it adds."""


async def add(request: Request) -> Response:
    """POST: add files from a form, or texts from JSON. 202: they are indexed in the background."""
    state = state_of(request)
    tenant = admitted(request)
    state.require_service()
    form = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"
    with state.bodies.receiving(request, uploads=True) as received:
        corpus, files, texts = await (_from_form if form else _from_json)(received)

        def work() -> tuple[DocumentStatus, ...]:
            return _begun(state, tenant, corpus).add(files, texts)

        return json_response(_list(await _in_turn(request, work)), 202)


async def listing(request: Request) -> Response:
    """GET: all documents with their progress."""
    return json_response(_list(await _of_corpus(request, lambda documents: documents.listing()) or ()))


async def get(request: Request) -> Response:
    """GET: one document by its id."""
    return json_response(_document(await _of_document(request, lambda documents, name: documents.get(name))))


async def delete(request: Request) -> Response:
    """DELETE: no new answer uses the document. Waits a while until it is out of the index, which others may be changing."""
    deadline = time.monotonic() + REMOVED_S
    name = request.path_params["id"]
    is_leaving = await _of_document(request, _removal)
    while await _in_turn(request, is_leaving) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
    return json_response({"id": name, "object": "document", "deleted": True})


async def retry(request: Request) -> Response:
    """POST: try a failed document again. 202: it is indexed in the background."""
    try:
        status = await _of_document(request, lambda documents, name: documents.retry(name))
    except ConfigError as error:
        raise refuse(first_line(error), "id", "conflict", 409) from None
    return json_response(_document(status), 202)


async def delete_session(request: Request) -> Response:
    """DELETE: forget what only this session of the key's tenant and of the named end user left; says how much that was."""
    tenant = admitted(request)
    session = request.path_params["session"]
    user = digest_of_user(_queried(request, "safety_identifier"))
    service = state_of(request).require_service()
    try:
        session_name(session)
    except ValueError as error:
        raise refuse(str(error), "session") from None

    def work() -> dict[str, int]:
        forgotten, row_bytes = service.end_session(tenant, user, session_of(request, session))
        return {"texts": forgotten.texts, "bytes": forgotten.nbytes, "prefix_bytes": row_bytes}

    counts = await _in_turn(request, work)
    return json_response({"id": session, "object": "session", "deleted": True, **counts})


def _removal(documents: Documents, name: str) -> Callable[[], bool] | None:
    """Delete a document; None for an unknown one. Returns what tells whether it is still in the index."""
    removed = documents.delete(name)
    return None if removed is None else lambda: removed in documents.leaving


async def _of_document(request: Request, call: Callable[[Documents, str], T | None]) -> T:
    """Call this with the request's document; None refuses an unknown one."""
    name = request.path_params["id"]
    result = await _of_corpus(request, lambda documents: call(documents, name))
    if result is None:
        message = f"there is no document {shown(name)}; GET /v1/documents lists those there are"
        raise refuse(message, "id", "not_found", 404)
    return result


async def _of_corpus(request: Request, call: Callable[[Documents], T | None]) -> T | None:
    """Call this with the documents of the request's corpus, in turn; None without that corpus, which is not created."""
    tenant = admitted(request)
    corpus = _queried(request)

    def work() -> T | None:
        service = state_of(request).require_service()
        service.require_store(tenant)
        return call(service.documents(tenant, corpus)) if corpus in service.begun(tenant) else None

    return await _in_turn(request, work)


async def _in_turn(request: Request, call: Callable[[], T]) -> T:
    """Call this in a thread, when it is the client's turn."""

    def work() -> Slices[T]:
        yield from ()  # one slice
        return call()

    return await state_of(request).documents.run(client_of(request), work())


def _begun(state: AppState, tenant: str, corpus: str) -> Documents:
    """The documents of a corpus, which exists from its first upload on."""
    service = state.require_service()
    service.require_store(tenant)
    if len({*service.begun(tenant), corpus}) > state.limits.corpora:
        raise refuse(f"{state.limits.corpora} corpora are all that there may be; use one of them", "corpus")
    return service.documents(tenant, corpus)


async def _from_json(request: Request) -> Addition:
    body = await run_in_threadpool(read_body, await request.body(), UploadBody)
    documents = [GivenDocument(document.text, document.title, document.id) for document in body.documents]
    return _named_corpus(request, body.corpus), [], documents


async def _from_form(request: Request) -> Addition:
    try:
        async with request.form(max_files=_MOST_FILES, max_fields=len(_FORM_FIELDS)) as form:
            files: list[UploadedFile] = []
            fields: dict[str, str] = {}
            for name, value in form.multi_items():
                if isinstance(value, UploadFile) and name == "file":
                    files.append(UploadedFile(value.filename or "", await value.read()))
                elif isinstance(value, str) and name in ("corpus", "text_field"):
                    fields[name] = value
                else:
                    raise refuse(f"unknown part {shown(name)}; parts are files named 'file'", None, "unknown_parameter")
    except HTTPException as error:
        raise refuse(f"the form cannot be read: {' '.join(str(error.detail).split())[:200]}") from None
    if not files:
        raise refuse("the form has no part 'file'", "file", "missing_required_parameter")
    if "text_field" in fields:
        files = [file._replace(text_field=fields["text_field"]) for file in files]
    return _named_corpus(request, fields.get("corpus")), files, []


def _queried(request: Request, name: str = "corpus") -> str:
    """The value of the only parameter that the address may have, or ""."""
    if unknown := sorted(request.query_params.keys() - {name}):
        raise refuse(f"unknown query parameter {shown(unknown[0])}; there is {name}", None, "unknown_parameter")
    return request.query_params.get(name, "")


def _named_corpus(request: Request, in_body: str | None) -> str:
    """The corpus that the address or the body names."""
    queried = _queried(request)
    if in_body is not None and queried and in_body != queried:
        raise refuse("the body and the address name different corpora", "corpus")
    return in_body if in_body is not None else queried


def _list(statuses: tuple[DocumentStatus, ...]) -> Json:
    return {"object": "list", "data": [_document(status) for status in statuses]}


def _document(status: DocumentStatus) -> Json:
    return {
        "id": status.id,
        "object": "document",
        "file": file_of(status.id) or None,
        "title": status.title,
        "status": status.state,
        "chunks": status.chunks,
        "progress": {"done": status.tokens_done, "total": status.tokens_total},
        "reason": status.reason or None,
    }
