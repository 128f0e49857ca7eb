"""What a server is called by, and the origins of pages that may ask it."""

from __future__ import annotations

import ipaddress
import re

from blend.errors import ConfigError
from blend.limits import shown

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?/?")
_USUAL_PORTS = {"http": "80", "https": "443"}  # which browsers leave out


def is_loopback(host: str) -> bool:
    """Whether this name or address, without a port, is this machine's own, whoever is asked."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def origin_of(url: str) -> str:
    """An origin as browsers write it: scheme, host and a port that is not the scheme's usual one.

    Raises `ConfigError` for what is none, a path or a wildcard among it.
    """
    found = _ORIGIN.fullmatch(url.lower())
    if found is None:
        raise ConfigError(f"{shown(url)} is no origin: give scheme and host alone, such as https://rag.example.org")
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _USUAL_PORTS.get(scheme) else "")
