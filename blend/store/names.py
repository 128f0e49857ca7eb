"""What a store's things are called in its backend, see `backend`."""

from __future__ import annotations

import re

from blend.errors import StoreError
from blend.store.backend import CACHES
from blend.types import ChunkKey

SUFFIX = ".safetensors"
ARTIFACTS, DESCRIPTIONS, GENERATION, INDEXES = "artifacts/", "namespaces/", "generation", "indexes/"
SOURCES, PINS, SEALED = "sources/", "pins/", "sealed"

_HEX = re.compile(r"[0-9A-Za-z_-]{1,128}")
_ARTIFACT = re.compile(r"[0-9a-z_-]{1,128}")
_CORPUS = r"[0-9a-z_][0-9a-z_-]{0,63}"
_OTHERS = (
    rf"{ARTIFACTS}{_ARTIFACT.pattern}",
    rf"{DESCRIPTIONS}{_HEX.pattern}\.json",
    rf"{SOURCES}{_CORPUS}(\.{_HEX.pattern})?",
    rf"{PINS}[0-9a-f]{{8,128}}",
    rf"{INDEXES}{_CORPUS}/[0-9A-Za-z][0-9A-Za-z._-]{{0,127}}",
)
_OTHER = re.compile("|".join(_OTHERS))


def is_name(name: str) -> bool:
    """Whether a store itself gives this name to a cache or to what it keeps beside them."""
    if not name.startswith(CACHES):
        return bool(_OTHER.fullmatch(name))
    try:
        return name.count("/") == 3 and name == cache_name(key_of(name))
    except StoreError:
        return False


def cache_name(key: ChunkKey) -> str:
    """Name of a chunk cache; raises `StoreError` for a key that `CacheIdentity` cannot have made."""
    digest = _safe(key.digest)
    return f"{CACHES}{_safe(key.namespace)}/{digest[:2]}/{digest}{SUFFIX}"


def caches_of(namespace: str) -> str | None:
    """The folder of a namespace's caches; None for what no namespace is called, and no cache lies under."""
    return f"{CACHES}{namespace}/" if _HEX.fullmatch(namespace) else None


def key_of(name: str) -> ChunkKey:
    """The key that `cache_name` made this name of."""
    parts = name.split("/")
    return ChunkKey(parts[1], parts[-1].removesuffix(SUFFIX))


def description_name(namespace: str) -> str:
    """Name of a namespace's description."""
    return f"{DESCRIPTIONS}{_safe(namespace)}.json"


def artifact_name(name: str) -> str:
    """Name of an artifact; raises `StoreError` when this cannot name one."""
    if not _ARTIFACT.fullmatch(name):
        raise StoreError(f"{name!r} cannot name an artifact: use lower-case letters, digits, dashes and underscores")
    return ARTIFACTS + name


def _safe(name: str) -> str:
    if not _HEX.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a store entry: use the hex digests that CacheIdentity.key makes")
    return name
