"""Digests of a store's bytes, and the small things that are sealed with them.

    artifacts/<name>              one line "kvblend artifact 2 <digest of name and content>", then the content (1: older digest)
    namespaces/<namespace>.json   what a namespace stands for; it informs only, so it has no digest
    sealed                        an artifact that only the store's key can make: others are told that their key is wrong

Without a store key a digest finds accidents. With one, nobody without the key can make an entry or artifact that is used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash
from blake3 import blake3

from blend.errors import ConfigError, EntryDamagedError, StoreError
from blend.store.backend import ARTIFACTS, DESCRIPTIONS, SEALED, SOURCES, Backend

DIGEST_CHARS = 32
SHORTEST_KEY = 16
_LONGEST_KEY_FILE = 1 << 16
_BLAKE2B_KEY = 64

Purpose = Literal["header", "layer", "artifact"]
Buffer = bytes | bytearray | memoryview

_OPENING, _OLDER_OPENING = b"kvblend artifact 2 ", b"kvblend artifact 1 "
MOST_BYTES = 1 << 30
_MOST_OF_A_DESCRIPTION = 1 << 20
_MOST = 1 << 10


class Seal(ABC):
    """Makes and checks digests of 32 hex digits. keyed: whether they need a key. foreign: the message for bytes that fail."""

    foreign: str
    keyed: bool = False

    @property
    def older(self) -> Seal:
        """Checks what was written before blake3, with the same key."""
        return self

    @abstractmethod
    def digest(self, purpose: Purpose, *parts: Buffer) -> str:
        """The digest of the parts in a row."""

    def holds(self, digest: str | bytes, purpose: Purpose, *parts: Buffer) -> bool:
        """Whether `digest` is that of the parts. Takes the same time wherever the two differ."""
        given = digest if isinstance(digest, bytes) else digest.encode(errors="replace")
        return hmac.compare_digest(given, self.digest(purpose, *parts).encode())


class Unsealed(Seal):
    """No digest: for bytes that never leave this process, or were verified already."""

    foreign = "it is not what was written"

    def digest(self, purpose: Purpose, *parts: Buffer) -> str:
        """Zeros."""
        return "0" * DIGEST_CHARS

    def holds(self, digest: str | bytes, purpose: Purpose, *parts: Buffer) -> bool:
        """Always."""
        return True


class _KeySeal(Seal):
    """With a key, each purpose has digests that nobody without the key can make; without one, digests find accidents."""

    def __init__(self, key: bytes | None) -> None:
        self._key, self.keyed = key, key is not None
        written = "it was not written with this store key" if self.keyed else "it was written with a store key"
        self.foreign = f"it is not what was written, or {written}"


class Blake3Seal(_KeySeal):
    """blake3: 3.5 GB/s with and without a key, layers of 1 MB on one thread of a server processor."""

    def __init__(self, key: bytes | None) -> None:
        super().__init__(key)
        self._keys: dict[str, bytes] = {}
        if key is not None:
            contexts = {purpose: f"kvblend store {purpose}" for purpose in get_args(Purpose)}
            self._keys = {one: blake3(key, derive_key_context=context).digest() for one, context in contexts.items()}

    @property
    def older(self) -> Seal:
        """xxh3, or BLAKE2b with the key."""
        return OlderSeal(self._key)

    def digest(self, purpose: Purpose, *parts: Buffer) -> str:
        """With a key, another one for every purpose."""
        state = blake3(key=self._keys[purpose]) if self.keyed else blake3()
        for part in parts:
            state.update(part)
        return state.hexdigest(length=DIGEST_CHARS // 2)


class OlderSeal(_KeySeal):
    """What entries and artifacts had before blake3: xxh3-128, or BLAKE2b (RFC 7693) with a key. Only read."""

    def digest(self, purpose: Purpose, *parts: Buffer) -> str:
        """With a key, another one for every purpose."""
        state: Any = xxhash.xxh3_128()
        if self._key is not None:
            key = self._key if len(self._key) <= _BLAKE2B_KEY else hashlib.blake2b(self._key).digest()
            state = hashlib.blake2b(key=key, digest_size=DIGEST_CHARS // 2, person=f"kvblend {purpose}".encode())
        for part in parts:
            state.update(part)
        return str(state.hexdigest())


def make_seal(key: bytes | None) -> Seal:
    """The seal of new entries. Raises `ConfigError` for a key that is too short."""
    return Blake3Seal(None if key is None else require_key(key))


def require_key(key: bytes, source: str = "the store key") -> bytes:
    """The key; raises `ConfigError` that begins with `source` when it is shorter than 16 bytes."""
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"{source} has {len(key)} bytes, {SHORTEST_KEY} are the least: "
            "make one with `head -c 32 /dev/urandom | base64`"
        )
    return key


def read_store_key(path: str | os.PathLike[str], name: str = "store key") -> bytes:
    """The key in a file, all of its bytes without the line end behind them. name: how messages call it.

    Raises `ConfigError` when the file cannot be read, or its key is shorter than 16 bytes or longer than 64 KiB. Warns
    when others may read the file.
    """
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            key = opened.read(_LONGEST_KEY_FILE + 1).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(
            f"the {name} {file} cannot be read ({error.strerror or error}): name a file that holds the key"
        ) from None
    if len(key) > _LONGEST_KEY_FILE:
        raise ConfigError(f"the {name} {file} is longer than {_LONGEST_KEY_FILE} bytes: name a file that holds the key")
    if stat.S_ISREG(mode) and mode & 0o007:
        warnings.warn(f"everyone on this machine can read the {name} {file}: `chmod 600 {file}`", stacklevel=2)
    return require_key(key, f"the {name} {file}")


def pack_artifact(name: str, content: bytes, seal: Seal) -> tuple[bytes, bytes]:
    """What is kept of it; raises `StoreError` when it is too long."""
    if len(content) > MOST_BYTES // 2:
        raise StoreError(f"{name} takes {len(content)} bytes, an artifact {MOST_BYTES // 2} at most")
    digest = seal.digest("artifact", name.encode() + b"\n", content)
    return _OPENING + digest.encode() + b"\n", content


def unpack_artifact(name: str, raw: bytes, seal: Seal) -> bytes:
    """The content, its digest verified; raises `EntryDamagedError`."""
    opening, _, content = raw.partition(b"\n")
    used = seal.older if opening.startswith(_OLDER_OPENING) else seal
    digest = opening.removeprefix(_OLDER_OPENING).removeprefix(_OPENING)
    if digest == opening or not used.holds(digest, "artifact", name.encode() + b"\n", content):
        raise EntryDamagedError(seal.foreign)
    return content


def is_as_written(name: str, raw: bytes, seal: Seal) -> bool:
    """Whether what lies under a backend's name is what was put there; of names that have no digest nothing else is known."""
    if not name.startswith((ARTIFACTS, SOURCES, SEALED)):
        return True
    try:
        unpack_artifact(name.removeprefix(ARTIFACTS), raw, seal)
    except EntryDamagedError:
        return False
    return True


def pack_description(words: Mapping[str, str]) -> bytes:
    """What is kept of it."""
    return as_json(dict(words))


def read_descriptions(backend: Backend) -> dict[str, dict[str, str]]:
    """Every namespace's description; a damaged one reads as empty. Raises `StoreError`."""
    names = [name for page in backend.names(DESCRIPTIONS) for name in page if name.endswith(".json")]
    return {name.removeprefix(DESCRIPTIONS).removesuffix(".json"): _read_description(backend, name) for name in names}


def _read_description(backend: Backend, name: str) -> dict[str, str]:
    fields: object = None
    with suppress(EntryDamagedError, ValueError, RecursionError):
        fields = json.loads(backend.read(name, _MOST_OF_A_DESCRIPTION) or b"")
    return {k: str(v) for k, v in fields.items()} if isinstance(fields, dict) else {}


def as_json(fields: Mapping[str, object]) -> bytes:
    """JSON for people to read."""
    return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"


def leave_key_check(backend: Backend, seal: Seal) -> None:
    """Let whoever opens the store be held against this key, unless there is a check. Raises `StoreError`."""
    if seal.keyed and _check_of(backend) is None:
        with suppress(EntryDamagedError):  # something took its place: then there is no check
            backend.swap(SEALED, b"".join(pack_artifact(SEALED, b"", seal)), None)


def is_sealed_with(backend: Backend, seal: Seal) -> bool:
    """Whether the store says that this is its key; it says nothing before its first sealed artifact. Raises `StoreError`."""
    return seal.keyed and _check_of(backend) is not None


def require_its_key(backend: Backend, seal: Seal) -> None:
    """Raise `StoreError` where the store is sealed with a key that is not this one; one of before may have no check."""
    check = _check_of(backend)
    if check is None or (seal.keyed and _holds(check, seal)):
        return
    place = backend.place
    if not seal.keyed:
        raise StoreError(
            f"the store {place} is sealed with a store key: give --store-key FILE, the key that it was made with"
        )
    raise StoreError(
        f"the store {place} is sealed with another store key: give the one that it was made with, or remove {SEALED!r} in it "
        "to have everything computed again under this one"
    )


def _check_of(backend: Backend) -> bytes | None:
    """None where there is none, or something else took its place."""
    try:
        return backend.read(SEALED, _MOST)
    except EntryDamagedError:
        return None


def _holds(check: bytes, seal: Seal) -> bool:
    try:
        unpack_artifact(SEALED, check, seal)
    except EntryDamagedError:
        return False
    return True
