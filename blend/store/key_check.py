"""Which key a store is sealed with, as far as that can be told: a name beside `store.json` that only this key can make.

It is written with the first sealed artifact. A store that is opened without its key, or with another, would seem to hold
nothing but damage; what is computed again and removed then is lost to all who have the key.
"""

from __future__ import annotations

from contextlib import suppress

from blend.errors import EntryDamagedError, StoreError
from blend.store.backend import SEALED, Backend
from blend.store.seal import Seal, pack_artifact, unpack_artifact

_MOST = 1 << 10


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
