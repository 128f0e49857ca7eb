"""API keys: a file of them, and the tenant of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

from blend.errors import ConfigError
from blend.store.seal import read_secret
from blend.text import check_corpus_name

_LONGEST_FILE = 1 << 20
_LONGEST_KEY = 512


class ApiKeys:
    """The known API keys, each with its tenant.

    Args:
        keys: pairs of key and tenant. Keys of the tenant "" share the server's own store; without any key all clients do.

    Raises:
        ConfigError: a key that no header can carry, an invalid tenant name, or one key of two tenants.

    """

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._tenants = dict[bytes, str]()
        for key, tenant in keys:
            _check_key(key, tenant)
            if self._tenants.setdefault(digest_of_key(key), tenant) != tenant:
                raise ConfigError(
                    f"one API key is given to two tenants, {tenant or 'none'} and another: give each its own"
                )

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._tenants)

    def tenant_of(self, key: str | None) -> str | None:
        """The tenant of a key; None for an unknown key. Digests are looked up: the time says nothing of other keys."""
        return self._tenants.get(digest_of_key(key or "")) if self.required else ""


def read_keys(path: Path) -> list[tuple[str, str]]:
    """Read a file of keys: a key a line, with its tenant behind it if it has one; # starts a comment.

    Raises `ConfigError` for a file that cannot be read or parsed. Warns if other users can read it.
    """
    try:
        text = read_secret(path, "file of API keys", _LONGEST_FILE).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"the file of API keys {path} is not UTF-8 text") from None
    keys = list(_keys_in(text, path))
    if not keys:
        raise ConfigError(
            f"the file of API keys {path} holds none: write a key a line, with its tenant behind it if any"
        )
    return keys


def _keys_in(text: str, path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if len(words) > 2:
                raise ConfigError(f"a line is `KEY` or `KEY TENANT`; it has {len(words)} words")
            key, tenant = (*words, "")[:2]
            _check_key(key, tenant)
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        yield key, tenant


def _check_key(key: str, tenant: str) -> None:
    if not (key.isascii() and key.isprintable() and key.split() == [key] and len(key) <= _LONGEST_KEY):
        raise ConfigError(f"an API key is 1 to {_LONGEST_KEY} printable ASCII characters without spaces")
    check_corpus_name(tenant)


def digest_of_key(key: str) -> bytes:
    """The digest by which a key is looked up and its holder takes turns."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
