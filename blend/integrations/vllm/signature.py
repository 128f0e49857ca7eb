"""Tickets are signed: a scheduler takes up those alone that the middleware before its own engine has given out.

Both know what no client does: the engine's id, which vLLM draws at random and hands to all processes of an engine.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from blend.errors import ConfigError

PARAMETER = "kvblend"  # ours in a request's kv_transfer_params


class Signer:
    """Signs tickets, and knows its own again."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def of(cls, config: Any) -> Signer:
        """config: the `VllmConfig`. Raises `ConfigError` for an engine without an id."""
        transfer = getattr(config, "kv_transfer_config", None)
        if transfer is None:
            return cls(secrets.token_bytes(32))  # without a connector nobody takes tickets up
        engine = (transfer.engine_id or "").partition("_dp")[0]  # with data parallelism engines append their number
        if not engine:
            raise ConfigError("kvblend: this engine has no id; leave engine_id out of --kv-transfer-config")
        return cls(engine.encode())

    def signed(self, ticket: str, salt: str) -> dict[str, Any]:
        """kv_transfer_params of a request with this ticket and this cache_salt."""
        return {PARAMETER: {"ticket": ticket, "signature": self._signature(ticket, salt)}}

    def ticket(self, given: Mapping[str, Any], salt: str) -> str | None:
        """The ticket in our parameter of a request with this cache_salt; None where it was not signed here."""
        ticket, signature = given.get("ticket"), given.get("signature")
        if not (isinstance(ticket, str) and isinstance(signature, str)):
            return None
        expected = self._signature(ticket, salt)
        return ticket if hmac.compare_digest(_bytes(signature), _bytes(expected)) else None

    def _signature(self, ticket: str, salt: str) -> str:
        told = sha256(_bytes(ticket)).digest() + sha256(_bytes(salt)).digest()
        return hmac.digest(self._secret, b"kvblend vllm ticket" + told, sha256).hex()


def _bytes(text: str) -> bytes:
    """A client's JSON may hold lone surrogates, which are no Unicode text."""
    return text.encode("utf-8", "surrogatepass")
