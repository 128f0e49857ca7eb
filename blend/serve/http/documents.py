"""/v1/documents: what the server's corpora hold, changed while questions are answered."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from blend.limits import shown
from blend.serve.http.bodies import read_upload
from blend.serve.http.errors import ApiError, json_response, refuse
from blend.serve.http.state import AppState, admitted, limited, receive_all, state_of
from blend.serve.types import GivenDocument
from blend.serve.uploads import UploadedFile

if TYPE_CHECKING:
    from blend.serve.documents import Documents, DocumentStatus

_MOST_FILES = 100
_REMOVED_S = 10.0  # in which who deletes hears of what kept it from being done
_IN_A_FORM = ("file", "corpus")


class _Brought(NamedTuple):
    """What a request adds, and to which corpus."""

    corpus: str
    files: list[UploadedFile]
    texts: list[GivenDocument]


async def add(request: Request) -> Response:
    """POST: files as a form, or texts as JSON. 202: they are prepared in the background; GET tells how far they are."""
    state, tenant = state_of(request), admitted(request)
    state.require_service()
    form = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"
    with limited(request, state.limits.upload_bytes, state.limits.upload_s, state.bodies) as receive:
        brought = await (_from_form if form else _from_json)(request, receive)

        def work() -> tuple[DocumentStatus, ...]:
            return _begun(state, tenant, brought.corpus).add(brought.files, brought.texts)

        return json_response(_list(await run_in_threadpool(work)), 202)


async def listing(request: Request) -> Response:
    """GET: all documents, and how far they are."""
    state, tenant = state_of(request), admitted(request)
    corpus = _queried(request)

    def work() -> tuple[DocumentStatus, ...]:
        documents = _known(state, tenant, corpus)
        return documents.listing() if documents else ()

    return json_response(_list(await run_in_threadpool(work)))


async def get(request: Request) -> Response:
    """GET: one document, by its id."""
    state, tenant, name = state_of(request), admitted(request), request.path_params["id"]
    corpus = _queried(request)

    def work() -> DocumentStatus | None:
        documents = _known(state, tenant, corpus)
        return documents.get(name) if documents else None

    status = await run_in_threadpool(work)
    if status is None:
        raise _no_document(name)
    return json_response(_document(status))


async def delete(request: Request) -> Response:
    """DELETE: nothing is answered from it any more."""
    state, tenant, name = state_of(request), admitted(request), request.path_params["id"]
    corpus = _queried(request)

    def work() -> Future[None] | None:
        documents = _known(state, tenant, corpus)
        return documents.remove(name) if documents else None

    removal = await run_in_threadpool(work)
    if removal is None:
        raise _no_document(name)
    with suppress(TimeoutError):  # no thread waits: what is before it in the corpus may take a while
        await asyncio.wait_for(asyncio.wrap_future(removal), _REMOVED_S)
    return json_response({"id": name, "object": "document", "deleted": True})


def _known(state: AppState, tenant: str, corpus: str) -> Documents | None:
    """Of a corpus that there is; None where there is none: asking after one does not make it."""
    service = state.require_service()
    service.require_store(tenant)
    return service.documents(tenant, corpus) if corpus in service.begun(tenant) else None


def _begun(state: AppState, tenant: str, corpus: str) -> Documents:
    """Of a corpus that there is as soon as a document was taken in."""
    service = state.require_service()
    service.require_store(tenant)
    if len({*service.begun(tenant), corpus}) > state.limits.corpora:
        raise refuse(f"{state.limits.corpora} corpora are all that there may be; use one of them", "corpus")
    return service.documents(tenant, corpus)


async def _from_json(request: Request, receive: Receive) -> _Brought:
    told = await run_in_threadpool(read_upload, await receive_all(receive))
    texts = [GivenDocument(one.text or "", one.title or "", one.id or "") for one in told.documents]
    return _Brought(_one(request, told.corpus), [], texts)


async def _from_form(request: Request, receive: Receive) -> _Brought:
    received = Request(request.scope, receive)
    try:
        async with received.form(max_files=_MOST_FILES, max_fields=len(_IN_A_FORM)) as form:
            files: list[UploadedFile] = []
            corpus = None
            for name, value in form.multi_items():
                if isinstance(value, UploadFile) and name == "file":
                    files.append(UploadedFile(value.filename or "", await value.read()))
                elif isinstance(value, str) and name == "corpus":
                    corpus = value
                else:
                    raise refuse(f"unknown part {shown(name)}; parts are files named 'file'", None, "unknown_parameter")
    except HTTPException as error:
        raise refuse(f"the form cannot be read: {' '.join(str(error.detail).split())[:200]}") from None
    if not files:
        raise refuse("the form has no part 'file'", "file", "missing_required_parameter")
    return _Brought(_one(request, corpus), files, [])


def _queried(request: Request) -> str:
    for name in request.query_params:
        if name != "corpus":
            raise refuse(f"unknown query parameter {shown(name)}", None, "unknown_parameter")
    return request.query_params.get("corpus", "")


def _one(request: Request, told: str | None) -> str:
    """The corpus that the address or the body names."""
    queried = _queried(request)
    if told is not None and queried and told != queried:
        raise refuse("the body and the address name different corpora", "corpus")
    return told if told is not None else queried


def _list(statuses: tuple[DocumentStatus, ...]) -> dict[str, Any]:
    return {"object": "list", "data": [_document(one) for one in statuses]}


def _document(status: DocumentStatus) -> dict[str, Any]:
    progress = {"done": status.tokens_done, "total": status.tokens_total}
    return {
        "id": status.id,
        "object": "document",
        "title": status.title,
        "status": status.state,
        "chunks": status.chunks,
        "progress": progress,
        "reason": status.reason or None,
    }


def _no_document(name: str) -> ApiError:
    return refuse(
        f"there is no document {shown(name)}; GET /v1/documents lists those there are", "id", "not_found", 404
    )
