"""Digests of a store's bytes, and the small things that are sealed with them.

    artifacts/<name>              one line "kvblend artifact 2 <digest of name and content>", then the content
    namespaces/<namespace>.json   what a namespace stands for; it informs only, so it has no digest
    sealed                        an artifact that only the store's key can make: others are told that their key is wrong

Without a store key a digest finds accidents. With one, nobody without the key can make an entry or artifact that is used.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from blake3 import blake3

from blend.errors import ConfigError, EntryDamagedError

DIGEST_CHARS = 32
SHORTEST_KEY = 16
_LONGEST_KEY_FILE = 1 << 16

Purpose = Literal["header", "layer", "artifact"]
Buffer = bytes | bytearray | memoryview

_OPENING = b"kvblend artifact 2 "


class Seal:
    """Makes and checks digests of 32 hex digits: blake3, 3.5 GB/s with and without a key on one thread of a server processor.

    With a key, each purpose has digests that need it; without one, digests find accidents. keyed: whether there is a key.
    foreign: the message for bytes that fail. Raises `ConfigError` for a key that is too short.
    """

    def __init__(self, key: bytes | None) -> None:
        self.keyed = key is not None
        written = "it was not written with this store key" if self.keyed else "it was written with a store key"
        self.foreign = f"it is not what was written, or {written}"
        self._keys: dict[str, bytes] = {}
        if key is not None:
            for purpose in get_args(Purpose):
                context = f"kvblend store {purpose}"
                self._keys[purpose] = blake3(require_key(key), derive_key_context=context).digest()

    def digest(self, purpose: Purpose, *parts: Buffer) -> str:
        """The digest of the parts in a row."""
        hasher = blake3(key=self._keys[purpose]) if self.keyed else blake3()
        for part in parts:
            hasher.update(part)
        return hasher.hexdigest()[:DIGEST_CHARS]

    def holds(self, digest: bytes, purpose: Purpose, *parts: Buffer) -> bool:
        """Whether `digest` is that of the parts. Takes the same time wherever the two differ."""
        expected = self.digest(purpose, *parts)
        return hmac.compare_digest(digest, expected.encode())


def require_key(key: bytes, source: str = "the store key") -> bytes:
    """The key; raises `ConfigError` that begins with `source` when it is shorter than 16 bytes."""
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"{source} has {len(key)} bytes, {SHORTEST_KEY} are the least: "
            "make one with `head -c 32 /dev/urandom | base64`"
        )
    return key


def read_store_key(path: str | os.PathLike[str]) -> bytes:
    """The key in a file, all of its bytes without the line end behind them.

    Raises `ConfigError` when the file cannot be read, or its key is shorter than 16 bytes or longer than 64 KiB. Warns
    when others may read the file.
    """
    file = Path(path).expanduser()
    secret = read_secret(file, "store key", _LONGEST_KEY_FILE)
    return require_key(secret.rstrip(b"\r\n"), f"the store key {file}")


def read_secret(file: Path, name: str, most: int) -> bytes:
    """The content of a file of secrets. name: how messages call it.

    Raises `ConfigError` when it cannot be read, or is longer than `most` bytes. Warns when others may read it.
    """
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(most + 1)  # bounded: a device may have no end
    except OSError as error:
        raise ConfigError(f"the {name} {file} cannot be read ({error.strerror or error}): name another file") from None
    if len(content) > most:
        raise ConfigError(f"the {name} {file} is longer than {most >> 10:,} KiB: name another file")
    if stat.S_ISREG(mode) and mode & 0o007:
        warnings.warn(f"everyone on this machine can read the {name} {file}: `chmod 600 {file}`", stacklevel=3)
    return content


def pack_artifact(name: str, content: bytes, seal: Seal) -> bytes:
    """What is kept of it."""
    digest = seal.digest("artifact", name.encode() + b"\n", content)
    return _OPENING + digest.encode() + b"\n" + content


def unpack_artifact(name: str, raw: bytes, seal: Seal) -> bytes:
    """The content, its digest verified; raises `EntryDamagedError`."""
    opening, _, content = raw.partition(b"\n")
    digest = opening.removeprefix(_OPENING)
    if digest == opening or not seal.holds(digest, "artifact", name.encode() + b"\n", content):
        raise EntryDamagedError(seal.foreign)
    return content


def as_json(fields: Mapping[str, object]) -> bytes:
    """JSON for people to read."""
    return json.dumps(dict(fields), indent=1, sort_keys=True).encode() + b"\n"
