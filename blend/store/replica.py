"""A directory of this machine that stands for a store elsewhere: a copy of its indexes, and the disk tier of its caches.

    <root>/kvblend-replica.json   the address that it stands for, and that of the Redis in front of it
    <root>/kv/                    the disk tier
    <root>/index/ ...             as in any store, fetched and published by `blend.sharing`

Whoever opens `<root>/kv`, or `kv` of a folder below (a tenant's), gets the store elsewhere with that tier in front.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from blend.errors import ConfigError, StoreError
from blend.files import cache_root, make_private_folder, write_atomically
from blend.store.addresses import check_address, inside, shown

FILE = "kvblend-replica.json"
_KIND = "kvblend replica"
_MOST_FOLDERS = 4  # between a replica and the `kv` of a tenant in it


class Origin(NamedTuple):
    """The store that a directory stands for. hot: address of a Redis in front of it."""

    address: str
    hot: str | None


def replica_of(address: str, cache: Path | None, hot: str | None) -> Path:
    """The directory that stands for the store at `address`, made when there is none; nothing is asked of the store.

    cache: which directory; without it one of this user's. Raises `ConfigError` for addresses that cannot be right, or a
    directory that stands for another store, and `StoreError` where it cannot be made.
    """
    origin = Origin(check_address(address), check_address(hot, hot=True) if hot else None)
    root = cache or _default_folder(origin.address)
    try:
        held = _read(root / FILE)
        if held is None and (root / "kv").exists():
            raise ConfigError(f"{root} is a store of its own: choose another directory with --store-cache")
        if held is not None and held.address != origin.address:
            raise ConfigError(
                f"{root} stands for {shown(held.address)} already: choose another directory with --store-cache"
            )
        if held != origin:
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


def origin_of(kv: Path) -> Origin | None:
    """The store of caches that the folder `kv` is the disk tier of; None where it is a store of its own."""
    root = root_of(kv.parent)
    origin = None if root is None else _read(root / FILE)
    if root is None or origin is None:
        return None
    below = kv.parent.relative_to(root).parts
    return origin._replace(address=inside(origin.address, *below))


def above(kv: Path) -> Path | None:
    """The folder of caches of the replica that `kv` lies in; None where it is that folder, or lies in none."""
    root = root_of(kv.parent)
    return None if root is None or root == kv.parent else root / "kv"


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


def _default_folder(address: str) -> Path:
    return cache_root() / "replicas" / hashlib.sha256(address.encode()).hexdigest()[:16]
