"""The wire between machines: TCP, for whoever shows that it knows the key. What passes is not encrypted.

Each end sends random bytes and proves by an HMAC over both ends' that it has the key; so neither can be impersonated by one who
listens, nor by one who sends back what it was sent.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

from blend.errors import ConfigError
from blend.store import read_store_key

SCHEME = "tcp://"
KEY_VARIABLE = "KVBLEND_VLLM_KEY"
_NONCE = _PROOF = 32  # bytes
# An end whose machine has gone says nothing any more: it is looked for after so many seconds, so often, with so many tries.
_IDLE_S, _EVERY_S, _TRIES = 15, 5, 3

Exactly = Callable[[int], bytes]
"""Receives so many bytes. Raises `WireError`."""


class StrangerError(Exception):
    """The other end does not know the key."""


def is_network(name: str) -> bool:
    """Whether a socket of this name is reached from other machines."""
    return name.startswith(SCHEME)


def place_of(name: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT. Raises `ConfigError`."""
    try:
        parts = urlsplit(name)
        if parts.hostname and parts.port and not (parts.path or parts.query or parts.username):
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise ConfigError(f"{name} is no place on a network: write tcp://HOST:PORT")


def key_path_of(options: Mapping[str, Any]) -> str:
    """The file with the key that the connector's options name, or else the environment; "" where neither does."""
    return str(options.get("key") or os.environ.get(KEY_VARIABLE, ""))


def shared_key(path: str = "") -> bytes:
    """The key, out of this file, or else of the one that the environment names. Raises `ConfigError`."""
    path = path or key_path_of({})
    if not path:
        raise ConfigError(
            f"between machines a key is needed: name a file that holds it in {KEY_VARIABLE}, or as key in "
            "kv_connector_extra_config, on each of them; Ray's workers are given the variable only with "
            "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVBLEND_"
        )
    with warnings.catch_warnings(action="ignore"):  # who may read it is told where the process starts
        return read_store_key(path, "socket key")


def bound(name: str) -> socket.socket:
    """A socket that has this place and does not listen yet. Raises `ConfigError`, and `OSError` where it is taken."""
    shared_key()
    found = socket.getaddrinfo(*place_of(name), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    place = socket.socket(family, kind, protocol)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except OSError:
        place.close()
        raise
    return place


def connected(name: str, seconds: float) -> socket.socket:
    """A connection on which nothing was said yet. Raises `ConfigError`, `OSError`."""
    return socket.create_connection(place_of(name), seconds)


def tend(sock: socket.socket) -> None:
    """Send at once, and notice when the other machine has gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _EVERY_S), ("TCP_KEEPCNT", _TRIES)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def prove(sock: socket.socket, exactly: Exactly, key_path: str = "") -> None:
    """Of the end that connected. Raises `StrangerError`, `ConfigError`, and as `exactly` does."""
    tend(sock)
    key, theirs, mine = shared_key(key_path), exactly(_NONCE), secrets.token_bytes(_NONCE)
    sock.sendall(mine + _proof(key, b"asks", theirs, mine))
    if not hmac.compare_digest(exactly(_PROOF), _proof(key, b"answers", theirs, mine)):
        raise StrangerError("it does not know the key")


def admit(sock: socket.socket, exactly: Exactly) -> None:
    """Of the end that was connected to; raises the same."""
    tend(sock)
    key, mine = shared_key(), secrets.token_bytes(_NONCE)
    sock.sendall(mine)
    theirs = exactly(_NONCE)
    if not hmac.compare_digest(exactly(_PROOF), _proof(key, b"asks", mine, theirs)):
        raise StrangerError("it does not know the key")
    sock.sendall(_proof(key, b"answers", mine, theirs))


def _proof(key: bytes, end: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, b"kvblend vllm " + end + b"".join(nonces), sha256)
