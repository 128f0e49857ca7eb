"""Addresses of stores, and the directories of this machine that stand for stores elsewhere.

An address is s3://bucket/prefix (gs://, az:// likewise), redis://host:port/db/prefix or file:///path. A *replica* is a
directory with the disk tier of such a store and a copy of its indexes:

    <root>/kvblend-replica.json   the address of the store, and of the Redis in front of it
    <root>/kv/                    the disk tier
    <root>/index/ ...             as in any store, fetched and published by `blend.corpora`

Whoever opens `<root>/kv`, or `kv` of a folder below (a tenant's), gets the store elsewhere with that tier in front.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from blend.errors import ConfigError, StoreError, first_line
from blend.files import cache_root, install_command, make_private_folder, write_atomically
from blend.store.backend import Backend
from blend.store.breaker import Timeouts

if TYPE_CHECKING:
    from blend.store.files import MountedFiles

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_OBJECTS = ("s3", "gs", "az", "abfs", "abfss")
_REDIS = ("redis", "rediss", "valkey", "valkeys")
_OFFERED = ("s3", "gs", "az", "redis", "rediss", "valkey", "file")
_SLIP = re.compile(rf"({'|'.join((*_OBJECTS, *_REDIS, 'file'))}):/?(?!/)", re.IGNORECASE)
_SAFE_PART = re.compile(r"[A-Za-z0-9._=-]+")

FILE = "kvblend-replica.json"
_KIND = "kvblend replica"
_MOST_FOLDERS = 4  # between a replica and the `kv` of a tenant in it


def is_address(location: str | os.PathLike[str]) -> bool:
    """Whether this names a store elsewhere, and no directory.

    Raises `ConfigError` for what would be a directory called `s3:`: an address that lacks a slash, or that was made a `Path`.
    """
    text = os.fspath(location)
    if slip := _SLIP.match(text):
        scheme = slip[1].lower()
        meant = "file:///" if scheme == "file" else f"{scheme}://"
        raise ConfigError(
            f"{slip[0]}... is no address of a store: write {meant}... as text; a directory of that name takes its whole path"
        )
    return isinstance(location, str) and bool(_ADDRESS.match(location))


def _is_redis(location: str) -> bool:
    return location.partition("://")[0].lower() in _REDIS


def check_address(location: str, *, hot: bool = False) -> str:
    """The address without a slash at its end, a Redis's with the number of its database. Raises `ConfigError`."""
    scheme, _, place = location.partition("://")
    allowed = _REDIS if hot else (*_OBJECTS, *_REDIS, "file")
    if scheme.lower() not in allowed or not place.strip("/"):
        names = ", ".join(f"{scheme}://" for scheme in (_REDIS if hot else _OFFERED))
        raise ConfigError(f"{shown(location)!r:.120} is no address of a store: give {names} and where it is")
    if not _is_redis(location):
        return location.rstrip("/")
    _redis(location)
    parts = urlsplit(location)  # a name behind the host would be taken for the number
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/0"))


def shown(location: str) -> str:
    """An address without its user, its password and its options, which may hold them too, for messages."""
    try:
        parts = urlsplit(location)
    except ValueError:  # brackets that are no address of a host
        return f"{location.partition('://')[0]}://..."
    if parts.scheme == "file":  # whatever stands in a path
        return location
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host, query="", fragment=""))


def inside(location: str, *names: str) -> str:
    """The address of what lies below another."""
    if not _is_redis(location):
        return "/".join((location.rstrip("/"), *names))
    parts = urlsplit(location)  # options stay at the end
    path = "/".join((parts.path.rstrip("/"), *names))
    return urlunsplit(parts._replace(path=path))


def remote_backend(
    location: str,
    timeouts: Timeouts,
    budget_bytes: int | None = None,
    local: Backend | None = None,
    above: MountedFiles | None = None,
) -> Backend:
    """The backend at an address; no server is asked yet.

    Args:
        location: the address.
        timeouts: how long its server is waited for.
        budget_bytes: what its caches may take; a server keeps its own budget.
        local: this machine's disk tier, see `MountedFiles`.
        above: the store that this one lies in, see `MountedFiles`.

    Raises:
        ConfigError: an address or credentials that cannot be right, or the `remote` extra is not installed.

    """
    location = check_address(location)
    if _is_mounted(location):
        from blend.store.disk import DiskBackend
        from blend.store.files import MountedFiles

        root = _directory(location)
        return DiskBackend(root, budget_bytes, MountedFiles(root, local, above))
    if budget_bytes is not None:
        raise ConfigError(
            f"{shown(location)} has no budget of kvblend's: it is kept small by `blend store prune`, or by its server; "
            "leave --store-budget out or give --store-cache, the disk that it then is for"
        )
    return _server_backend(location, timeouts)


def _is_mounted(location: str) -> bool:
    return location.partition("://")[0].lower() == "file"


def _directory(location: str) -> Path:
    return Path(location.partition("://")[2])


def hot_backend(location: str, of: str, timeouts: Timeouts) -> Backend:
    """A Redis in front of the store `of`, whose entries lie apart from those of other stores."""
    return _server_backend(inside(check_address(location, hot=True), _hashed(of)), timeouts)


def _server_backend(location: str, timeouts: Timeouts) -> Backend:
    try:
        if not _is_redis(location):
            return _object_backend(location, timeouts)
        from blend.store.redis import RedisBackend
    except ImportError as error:
        raise ConfigError(f"stores elsewhere need {error.name}: {install_command('remote')}") from None
    url, prefix = _redis(location)
    return RedisBackend(url, f"kvblend:{prefix}:", shown(location), timeouts)


def _redis(location: str) -> tuple[str, str]:
    """The URL that the client takes, and what stands behind the database's number: redis://host:6379/0/prefix."""
    try:
        parts = urlsplit(location)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{shown(location)!r:.120} is no address of a store: {error}") from None
    db, _, prefix = parts.path.lstrip("/").partition("/")
    is_safe = not prefix or all(map(_SAFE_PART.fullmatch, prefix.split("/")))
    if not (db or "0").isdigit() or not is_safe:
        raise ConfigError(
            f"{shown(location)!r:.120}: behind the host stands a number, that of the database, then a name"
        )
    scheme = "rediss" if parts.scheme.lower() in ("rediss", "valkeys") else "redis"
    return urlunsplit((scheme, parts.netloc, f"/{db or 0}", parts.query, "")), prefix


def _object_backend(location: str, timeouts: Timeouts) -> Backend:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    from blend.store.objects import ObjectBackend

    client_options: Any = {
        "connect_timeout": f"{timeouts.connect_s}s",
        "timeout": f"{timeouts.answer_s}s",
        "allow_http": True,  # where the endpoint says so,
    }

    def make(max_retries: int) -> Any:
        # A second try for an answer "slow down" or a closed connection; none when the first took all the time.
        retry_config: Any = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=timeouts.answer_s)}
        return from_url(location, client_options=client_options, retry_config=retry_config)

    try:
        return ObjectBackend(make(2), make(0), shown(location))
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(
            f"{shown(location)!r:.120} cannot be opened ({first_line(error):.160}): see its address and credentials"
        ) from None


class Origin(NamedTuple):
    """The store that a directory stands for. hot: address of a Redis in front of it."""

    address: str
    hot: str | None


def replica_of(address: str, cache: Path | None, hot: str | None) -> Path:
    """The directory, by default one of this user's, that stands for the store at `address`. Nothing is asked of the store.

    Raises `ConfigError` for wrong addresses or a directory that stands for another store, `StoreError` when it cannot be made.
    """
    origin = Origin(check_address(address), check_address(hot, hot=True) if hot else None)
    root = cache or cache_root() / "replicas" / _hashed(origin.address)
    try:
        current = _read(root / FILE)
        if current is None and (root / "kv").exists():
            raise ConfigError(f"{root} is a store of its own: choose another directory with --store-cache")
        if current is not None and current.address != origin.address:
            raise ConfigError(
                f"{root} stands for {shown(current.address)} already: choose another directory with --store-cache"
            )
        if current != origin:
            make_private_folder(root)
            fields = {"kind": _KIND, "address": origin.address, "hot": origin.hot}
            write_atomically(root / FILE, [json.dumps(fields, indent=1).encode() + b"\n"])
    except OSError as error:
        raise StoreError(
            f"{root} cannot be written ({error.strerror or error}): choose another directory with --store-cache"
        ) from None
    return root


def root_of(path: Path) -> Path | None:
    """The replica that `path` lies in; None where it lies in none."""
    for folder in (path, *path.parents[:_MOST_FOLDERS]):
        if (folder / FILE).is_file():
            return folder
    return None


def store_name(place: Path) -> str:
    """A store, or a folder in it, for a message: as its user names it, which is by its address if it lies elsewhere.

    Messages about this machine's copy alone name the path.
    """
    for folder in (place, *place.parents):
        if (folder / FILE).is_file():
            break
    else:
        return str(place)
    try:
        origin = _read(folder / FILE)
    except (StoreError, ConfigError):
        origin = None  # opening the store says so
    return str(place) if origin is None else shown(inside(origin.address, *place.relative_to(folder).parts))


def origin_of(kv: Path) -> Origin | None:
    """The store of caches that the folder `kv` is the disk tier of; None where it is a store of its own."""
    root = root_of(kv.parent)
    origin = None if root is None else _read(root / FILE)
    if root is None or origin is None:
        return None
    below = kv.parent.relative_to(root).parts
    return origin._replace(address=inside(origin.address, *below))


def mounted_above(kv: Path) -> MountedFiles | None:
    """The files of the mounted store that a tenant's store lies in; None for any other store."""
    from blend.store.disk import DiskBackend
    from blend.store.files import MountedFiles

    root = root_of(kv.parent)
    origin = None if root is None or root == kv.parent else origin_of(root / "kv")
    if root is None or origin is None or not _is_mounted(origin.address):
        return None
    return MountedFiles(_directory(origin.address), DiskBackend(root / "kv"))


def _read(file: Path) -> Origin | None:
    try:
        fields = json.loads(file.read_bytes())
        if fields["kind"] != _KIND:
            raise ValueError
        return Origin(check_address(str(fields["address"])), fields["hot"] and str(fields["hot"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise StoreError(f"{file} cannot be read or is damaged: delete it, and name the store by its address") from None


def _hashed(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()[:16]
