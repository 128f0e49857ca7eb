"""DELETE /v1/sessions/{session}: forget the text of one session."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from blend.limits import shown
from blend.serve.http.bodies import session_name
from blend.serve.http.errors import json_response, refuse
from blend.serve.http.questions import digest_of_user
from blend.serve.http.requests import admitted, client_of, state_of
from blend.serve.turns import Slices

_USER = "safety_identifier"


async def delete(request: Request) -> Response:
    """Forget what only this session of the key's tenant and of the named end user left; says how much that was."""
    state = state_of(request)
    tenant = admitted(request)
    session = request.path_params["session"]
    if unknown := sorted(request.query_params.keys() - {_USER}):
        raise refuse(f"unknown query parameter {shown(unknown[0])}; there is {_USER}", None, "unknown_parameter")
    try:
        session_name(session)
    except ValueError as error:
        raise refuse(str(error), "session") from None
    user = digest_of_user(request.query_params.get(_USER))

    def work() -> Slices[Response]:
        yield from ()  # one slice
        forgotten, row_bytes = state.require_service().end_session(tenant, user, session)
        counts = {"texts": forgotten.texts, "bytes": forgotten.nbytes, "prefix_bytes": row_bytes}
        return json_response({"id": session, "object": "session", "deleted": True, **counts})

    return await state.documents.run(client_of(request, tenant), work())
