"""Errors in OpenAI's shape, each with its HTTP status. `blend.serve.failures` decides which messages clients get."""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from blend.errors import ContextLengthError, StoreError, StoreNotWritableError
from blend.serve.events import EndReason, EngineFailedError, QueueFullError
from blend.serve.failures import CLIENT_ERRORS, NOT_WRITABLE, STORE_FAILS
from blend.text import json_text
from blend_retrieval.errors import IndexMissingError, RetrievalError

Json = dict[str, Any]
_GONE = 499  # nginx's status for a client that left; only the log shows it
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Ends a request with an error as the client gets it. kind: OpenAI's `type`. retry_s: for the header Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry_s: float | None = None,
    ) -> None:
        super().__init__(code)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.retry_s = retry_s
        self.closes = False

    def and_close(self) -> ApiError:
        """The same error; its response closes the connection."""
        self.closes = True
        return self

    @property
    def document(self) -> Json:
        """The body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_document(self) -> Json:
        """The body in the shape of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> Response:
        """The whole response to a request for this path."""
        headers = {} if self.retry_s is None else {"retry-after": str(max(1, math.ceil(self.retry_s)))}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.closes:
            headers["connection"] = "close"
        document = self.anthropic_document if path.startswith("/v1/messages") else self.document
        return json_response(document, self.status, headers)


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response; encodes every character, lone surrogates too."""
    return Response(json_text(document, allow_nan=False), status, headers, "application/json")


def refuse(message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> ApiError:
    """An error of the client."""
    return ApiError(status, message, code, param)


def wrong(field: str, words: str) -> ApiError:
    """A field has an invalid value."""
    return refuse(f"{field}: {words}", field)


def missing(field: str) -> ApiError:
    """A field must be given."""
    return refuse(f"{field} is missing", field, "missing_required_parameter")


def unavailable(message: str, code: str = "unavailable", retry_s: float | None = 1.0) -> ApiError:
    """A temporary error of the server."""
    return ApiError(503, message, code, None, "server_error", retry_s)


def closing() -> ApiError:
    """The server is shutting down: it accepts no request and keeps no connection."""
    return unavailable("the server is shutting down", "shutting_down").and_close()


def ended_early(reason: EndReason) -> ApiError:
    """The error for an answer that was given up."""
    if reason == "deadline":
        message = "the first token did not come within deadline_s"
        return ApiError(504, message, "deadline_exceeded", None, "timeout_error")
    if reason == "cancelled":
        return ApiError(_GONE, "the request was cancelled", "cancelled")
    return closing()


def failure_of(error: Exception) -> ApiError:
    """An exception as the client gets it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientDisconnect):
        return ended_early("cancelled")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "rate_limit_exceeded", None, "rate_limit_error", error.retry_after_s)
    if isinstance(error, EngineFailedError):
        return unavailable("the server has failed and must be started anew; its log says where", retry_s=None)
    if isinstance(error, IndexMissingError):
        return refuse("there is no corpus to retrieve from: add documents, or ask without", "kvblend", "no_corpus")
    if isinstance(error, ContextLengthError):
        return refuse(_too_long(error), "messages", "context_length_exceeded")
    if isinstance(error, CLIENT_ERRORS):
        return refuse(" ".join(str(error).split()), getattr(error, "param", None))
    if isinstance(error, StoreError):
        return unavailable(NOT_WRITABLE if isinstance(error, StoreNotWritableError) else STORE_FAILS)
    if isinstance(error, RetrievalError):
        return unavailable("the corpus cannot be searched now; the server's log says why")
    return ApiError(
        500, "the server failed at this request; its log says where", "internal_error", None, "server_error"
    )


def _too_long(error: ContextLengthError) -> str:
    """In OpenAI's words: clients recognise them and shorten the conversation."""
    return (
        f"This model's maximum context length is {max(0, error.longest)} tokens. However, your messages resulted in "
        f"{error.rows or 'more'} tokens. Please reduce the length of the messages."
    )
