"""Who may send requests: API keys with their tenants, and the addresses and origins that need none."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

from blend.errors import ConfigError
from blend.limits import check_corpus_name, shown

_LONGEST_FILE = 1 << 20
_LONGEST_KEY = 512
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?/?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}  # which browsers leave out


class ApiKeys:
    """The known API keys, each with its tenant.

    keys: pairs of key and tenant; keys of the tenant "" share the server's own store. Without any key everybody shares it.
    Raises `ConfigError` for a key that no header can carry, an invalid tenant name, and one key of two tenants.
    """

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._tenants: dict[bytes, str] = {}
        for key, tenant in keys:
            _check(key, tenant)
            if self._tenants.setdefault(_digest(key), tenant) != tenant:
                raise ConfigError(
                    f"one API key is given to two tenants, {tenant or 'none'} and another: give each its own"
                )

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._tenants)

    def tenant_of(self, key: str | None) -> str | None:
        """The tenant of a key; None for an unknown key. Takes the same time for wrong and right keys."""
        if not self.required:
            return ""
        given, found = _digest(key or ""), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(given, digest):
                found = tenant
        return found


def read_keys(path: Path) -> list[tuple[str, str]]:
    """Read a file of keys: a key a line, with its tenant behind it if it has one; # starts a comment.

    Raises `ConfigError` for a file that cannot be read or parsed. Warns if other users can read it.
    """
    try:
        with path.open("rb") as opened:  # bounded: a device may have no end
            mode, raw = os.fstat(opened.fileno()).st_mode, opened.read(_LONGEST_FILE + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"the file of API keys {path} cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the file of API keys {path} is not UTF-8 text") from None
    if len(raw) > _LONGEST_FILE:
        raise ConfigError(f"the file of API keys {path} is longer than {_LONGEST_FILE >> 20} MiB: name a file of keys")
    if stat.S_ISREG(mode) and mode & 0o007:
        warnings.warn(f"everyone on this machine can read the API keys in {path}: `chmod 600 {path}`", stacklevel=2)
    found = list(_lines(text, path))
    if not found:
        raise ConfigError(
            f"the file of API keys {path} holds none: write a key a line, with its tenant behind it if any"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether this name or address, without a port, is loopback on every machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def origin_of(url: str) -> str:
    """An origin as browsers write it: scheme, host, and the port unless it is the scheme's default.

    Raises `ConfigError` for anything else, such as a path or a wildcard.
    """
    found = _ORIGIN.fullmatch(url.lower())
    if found is None:
        raise ConfigError(f"{shown(url)} is no origin: give scheme and host alone, such as https://rag.example.org")
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")


def _lines(text: str, path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if len(words) > 2:
                raise ConfigError(f"a line is `KEY` or `KEY TENANT`; it has {len(words)} words")
            key, tenant = (*words, "")[:2]
            _check(key, tenant)
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        yield key, tenant


def _check(key: str, tenant: str) -> None:
    if not (key.isascii() and key.isprintable() and key.split() == [key] and len(key) <= _LONGEST_KEY):
        raise ConfigError(f"an API key is 1 to {_LONGEST_KEY} printable ASCII characters without spaces")
    check_corpus_name(tenant)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
