"""The HTTP interface of a `llama-server`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from blend.errors import BlendError

Headers = Sequence[tuple[bytes, bytes]]

_CONNECT_S = 10.0
_KEPT_ALIVE_S = 2.0  # llama-server closes idle connections after 5 s
_OF_ONE_CONNECTION = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_OF_ONE_REQUEST = frozenset((b"host", b"content-length"))


class UpstreamError(BlendError):
    """llama-server refused a request, or could not be asked.

    status: of its reply; 0 without one. The message is what it says.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Upstream:
    """A `llama-server`. `close` ends its connections.

    Args:
        url: its address, with a path if it has `--api-prefix`.
        key: the API key of kvblend's own requests; "" for none.

    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._base = httpx.URL(url)
        self._own_headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=_KEPT_ALIVE_S)
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        for name in list(self._client.headers):  # a client's request goes on as it came
            del self._client.headers[name]

    async def close(self) -> None:
        """End all connections."""
        await self._client.aclose()

    # Requests of clients

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> httpx.Response:
        """Pass a request on; the reply's body is still to be read. Raises `UpstreamError` if there is no reply.

        target: path and query, as they came.
        """
        path = self._base.raw_path.rstrip(b"/") + target
        skipped = _OF_ONE_CONNECTION | _OF_ONE_REQUEST
        forwarded = [(name, value) for name, value in headers if name.lower() not in skipped]
        request = self._client.build_request(
            method, self._base.copy_with(raw_path=path), headers=forwarded, content=body
        )
        try:
            return await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> UpstreamError:
        return UpstreamError(
            f"llama-server does not answer at {self.url} ({_words_of(error)}); start it, or name another with --upstream"
        )

    # Requests of kvblend

    async def ask(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The reply to a JSON body, or to a GET without one. Raises `UpstreamError`.

        headers: by default kvblend's own.
        """
        target = self._base.raw_path.rstrip(b"/") + path.encode()
        url = self._base.copy_with(raw_path=target)
        all_headers = dict(self._own_headers if headers is None else headers)
        try:
            if body is None:
                reply = await self._client.get(url, headers=all_headers)
            else:
                reply = await self._client.post(url, headers=all_headers, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if reply.status_code >= 400:
            raise UpstreamError(_message_of(reply), reply.status_code)
        try:
            return reply.json()
        except ValueError:
            raise UpstreamError(f"{path} of {self.url} does not answer in JSON; is it a llama-server?") from None

    async def tokenize(self, prompt: Any, headers: Mapping[str, str] | None = None) -> tuple[int, ...]:
        """The token ids of a prompt, as a completion of it has them. Raises `UpstreamError`."""
        body = {"content": prompt, "add_special": True, "parse_special": True}
        reply = await self.ask("/tokenize", body, headers)
        return tuple(map(int, reply["tokens"]))

    async def apply_template(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> str:
        """The prompt of a chat completion. Raises `UpstreamError`."""
        reply = await self.ask("/apply-template", body, headers)
        return str(reply["prompt"])

    async def count_messages(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> int:
        """How many tokens the prompt of a request to `/v1/messages` has. Raises `UpstreamError`."""
        reply = await self.ask("/v1/messages/count_tokens", body, headers)
        return int(reply["input_tokens"])

    async def slots(self) -> list[dict[str, Any]]:
        """What each slot does. Raises `UpstreamError`."""
        reply: list[dict[str, Any]] = await self.ask("/slots")
        return reply

    async def restore(self, slot: int, name: str) -> int:
        """Fill a slot from a file in llama-server's folder; the tokens that it holds then. Raises `UpstreamError`."""
        reply = await self.ask(f"/slots/{slot}?action=restore", {"filename": name})
        return int(reply["n_restored"])

    async def save(self, slot: int, name: str) -> None:
        """Write a slot to a file in llama-server's folder. Raises `UpstreamError`."""
        await self.ask(f"/slots/{slot}?action=save", {"filename": name})

    async def erase(self, slot: int) -> None:
        """Empty a slot. Raises `UpstreamError`."""
        await self.ask(f"/slots/{slot}?action=erase", {})

    async def complete(self, ids: Sequence[int], **options: Any) -> dict[str, Any]:
        """A completion of a prompt. Raises `UpstreamError`."""
        reply: dict[str, Any] = await self.ask("/completion", {"prompt": list(ids), **options})
        return reply


def replied_headers(reply: httpx.Response) -> list[tuple[bytes, bytes]]:
    """The headers of a reply that its client gets."""
    return [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in _OF_ONE_CONNECTION]


def _message_of(reply: httpx.Response) -> str:
    """What llama-server says of a refusal."""
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = reply.text
    return " ".join(str(message).split())[:300] or f"status {reply.status_code}"


def _words_of(error: httpx.HTTPError) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def as_json(body: bytes) -> dict[str, Any] | None:
    """A body's JSON object; None if it is none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
