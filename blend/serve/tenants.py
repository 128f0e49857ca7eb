"""Who may ask, and whose corpus they ask: API keys, each of which may belong to a tenant."""

from __future__ import annotations

import hmac
import os
import stat
import warnings
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

from blend.errors import ConfigError
from blend.limits import check_corpus_name

_LONGEST_FILE = 1 << 20
_LONGEST_KEY = 512


class Tenants:
    """The API keys that are known, each with its tenant.

    keys: pairs of key and tenant; a key of the tenant "" shares the common room. Without any key everybody may come in, to
    the common room. Raises `ConfigError` for a key that no header can carry, a name that is none, one key of two tenants.
    """

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._tenants: dict[bytes, str] = {}
        for key, tenant in keys:
            _check_key(key)
            check_corpus_name(tenant)
            if self._tenants.setdefault(_digest(key), tenant) != tenant:
                raise ConfigError(
                    f"one API key is given to two tenants, {tenant or 'none'} and another: give each its own"
                )

    @property
    def required(self) -> bool:
        """Whether a key is needed to come in."""
        return bool(self._tenants)

    @property
    def names(self) -> tuple[str, ...]:
        """The tenants in alphabetical order, "" among them where a key has none or none is needed."""
        return tuple(sorted(set(self._tenants.values()) or {""}))

    def of(self, key: str | None) -> str | None:
        """Whose key it is; None if it is nobody's. Takes as long for a wrong key as for a right one."""
        if not self.required:
            return ""
        given, found = _digest(key or ""), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(given, digest):
                found = tenant
        return found


def read_keys(path: Path) -> list[tuple[str, str]]:
    """The keys in a file: a key a line, its tenant behind it where it has one; # opens a comment.

    Raises `ConfigError` when the file cannot be read or a line is something else. Warns when others may read the file.
    """
    try:
        with path.open("rb") as opened:
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


def _lines(text: str, path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) > 2:
            raise ConfigError(f"{path}:{number}: a line is `KEY` or `KEY TENANT`; it has {len(words)} words")
        if not words:
            continue
        key, tenant = words[0], words[1] if len(words) == 2 else ""
        try:
            _check_key(key)
            check_corpus_name(tenant)
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        yield key, tenant


def _check_key(key: str) -> None:
    if not (key.isascii() and key.isprintable() and key.split() == [key] and len(key) <= _LONGEST_KEY):
        raise ConfigError(f"an API key is 1 to {_LONGEST_KEY} printable ASCII characters without spaces")


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
