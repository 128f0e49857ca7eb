"""`blend store ls`, `stats`, `verify`, `prune`, `pin`, `unpin`, `export`, `import`: over every tier of a store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from blend.cli import opening, options
from blend.cli.values import OUTPUT, PLACE, number

if TYPE_CHECKING:
    from blend.store import Backend, ChunkStore, Stored

_DAY_S = 86400.0
_TIERS = ("far", "hot", "local")


class Listed(NamedTuple):
    """A cache as `ls` shows it. age_s: since it was last used where the tier knows, else since it was put."""

    digest: str
    namespace: str
    nbytes: int
    age_s: float
    document: str
    pinned: bool


def open_caches(store: Path, store_key: Path | None) -> ChunkStore:
    """The caches of a store that must be there. Raises `StoreError`."""
    from blend.errors import StoreError
    from blend.store import open_store
    from blend.store.replica import root_of

    if root_of(store) is None and not (store / "kv").is_dir():
        raise StoreError(f"{store} holds no chunk caches; make some with `blend precompute PATH --store {store}`")
    return open_store(store / "kv", key=opening.store_key({"store_key": store_key}))


@click.command("ls")
@options.store_option
@options.store_key_option
@click.option("--tier", type=click.Choice(_TIERS), help="Of which tier.  [default: the one that decides]")
@options.json_option
def ls(store: Path, store_key: Path | None, tier: str | None, as_json: bool) -> None:
    """List the chunk caches: digest, size, age, document; a * where one is pinned."""
    from blend.cli.console import print_json, say

    for listed in _listed(open_caches(store, store_key), tier):
        if as_json:
            print_json(listed._asdict())
        else:
            mark = "*" if listed.pinned else " "
            size, age = _size(listed.nbytes), _age(listed.age_s)
            say(f"{listed.digest[:16]}{mark} {size:>9} {age:>8}  {listed.document or '-'}")


@click.command("stats")
@options.store_option
@options.store_key_option
@options.json_option
def stats(store: Path, store_key: Path | None, as_json: bool) -> None:
    """Show what each tier holds: caches, bytes, ages, and hits where the tier counts them."""
    from blend.cli.console import print_json, say

    rows = [_tier_stats(name, backend) for name, backend in _places(open_caches(store, store_key))]
    if as_json:
        print_json({"tiers": rows})
        return
    for row in rows:
        if "error" in row:
            say(f"{row['tier']:<6} {row['place']}: {row['error']}")
            continue
        ages = f", last used {_age(row['newest_s'])} to {_age(row['oldest_s'])} ago" if row["entries"] else ""
        hits = f", {row['hits']:,} hits and {row['misses']:,} misses of the whole server" if "hits" in row else ""
        say(f"{row['tier']:<6} {row['place']}: {row['entries']:,} caches, {_size(row['bytes'])}{ages}{hits}")


@click.command("verify")
@options.store_option
@options.store_key_option
@click.option("--delete", is_flag=True, help="Remove what is damaged; it is computed again on use.")
def verify(store: Path, store_key: Path | None, delete: bool) -> None:
    """Read every cache of every tier and hold it against its digests; an error where damage is left."""
    from blend.cli.console import say
    from blend.errors import StoreError
    from blend.store.archive import verify_entry
    from blend.store.backend import CACHES

    caches, checked = open_caches(store, store_key), 0
    damaged: list[tuple[Backend, str]] = []
    for tier, backend in _places(caches):
        one = caches.over(backend)
        for page in backend.names(CACHES):
            for name in page:
                checked += 1
                if problem := verify_entry(one, name):
                    damaged.append((backend, name))
                    say(f"{tier}: {problem}")
    if damaged and len(damaged) == checked and not caches.knows_its_key:
        raise StoreError(
            f"none of {checked:,} caches is what was written, so nothing is removed: is --store-key missing, or another one? "
            "If they are damaged indeed, `blend store --clear` removes them"
        )
    if damaged and not delete:
        raise StoreError(
            f"{len(damaged):,} of {checked:,} caches are damaged: remove them with --delete, they are computed again"
        )
    for backend, name in damaged:
        backend.delete(name)
    say(f"{checked:,} caches read, {len(damaged):,} damaged{' and removed' if damaged else ''}")


@click.command("prune")
@options.store_option
@options.store_key_option
@number("--older-than", "older_than", "Remove what was not used, or where that is not known put, for so many days.")
@click.option("--unused", is_flag=True, help="Remove what no document of any corpus is cached in.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune(store: Path, store_key: Path | None, older_than: float | None, unused: bool, dry_run: bool) -> None:
    """Remove chunk caches from every tier; pinned ones stay. With both options, what both say."""
    from blend.cli.console import say
    from blend.errors import ConfigError
    from blend.store.backend import CACHES

    if older_than is None and not unused:
        raise ConfigError("say what is to go: --older-than DAYS, --unused or both")
    caches = open_caches(store, store_key)
    going = [
        one
        for one in _listed(caches, None)
        if not one.pinned and (older_than is None or one.age_s > older_than * _DAY_S) and not (unused and one.document)
    ]
    for one in going if not dry_run else ():
        caches.backend.delete(f"{CACHES}{one.namespace}/{one.digest[:2]}/{one.digest}.safetensors")
    done = "would go" if dry_run else "removed"
    say(f"{len(going):,} caches {done}, {_size(sum(one.nbytes for one in going))}")


@click.command("pin")
@click.argument("wanted", nargs=-1, required=True)
@options.store_option
@options.store_key_option
def pin(wanted: tuple[str, ...], store: Path, store_key: Path | None) -> None:
    """Keep the caches of these documents, or with these digests, from being pruned and from leaving a disk tier."""
    _pin(wanted, open_caches(store, store_key), on=True)


@click.command("unpin")
@click.argument("wanted", nargs=-1, required=True)
@options.store_option
@options.store_key_option
def unpin(wanted: tuple[str, ...], store: Path, store_key: Path | None) -> None:
    """Let them go again."""
    _pin(wanted, open_caches(store, store_key), on=False)


@click.command("export")
@click.argument("file", type=OUTPUT)
@options.store_option
@options.store_key_option
def export(file: Path, store: Path, store_key: Path | None) -> None:
    """Write all caches, and of a shared store the indexes, into one tar file, as they are."""
    from blend.cli.console import say
    from blend.store.archive import export_store

    done = export_store(open_caches(store, store_key), file)
    say(f"{file}: {done.names:,} names, {_size(done.nbytes)}")


@click.command("import")
@click.argument("file", type=PLACE)
@options.store_option
@options.store_key_option
def import_(file: Path, store: Path, store_key: Path | None) -> None:
    """Put what `export` wrote into a store, every cache verified; one that is there is replaced."""
    from blend.cli.console import note, say
    from blend.store import open_store
    from blend.store.archive import import_store

    done = import_store(lambda: open_store(store / "kv", key=opening.store_key({"store_key": store_key})), file)
    for line in done.refused:
        note(f"left out: {line}")
    say(f"{done.names:,} names, {_size(done.nbytes)}; {len(done.refused):,} left out")


COMMANDS = (ls, stats, verify, prune, pin, unpin, export, import_)


def _pin(wanted: tuple[str, ...], caches: ChunkStore, *, on: bool) -> None:
    from blend.cli.console import say
    from blend.errors import ConfigError
    from blend.store import sources

    found = [one for one in _listed(caches, None) if any(_is(one, text) for text in wanted)]
    if not found:
        raise ConfigError("no cache is of such a document or has such a digest: `blend store ls` shows them")
    if on:
        caches.prefetch(sources.key_of(one.namespace, one.digest) for one in found)
    for _, backend in _places(caches):
        for one in found:
            sources.pin(backend, one.digest, on=on)
    say(f"{len(found):,} caches {'pinned' if on else 'let go'}")


def _is(one: Listed, text: str) -> bool:
    return one.document == text or (len(text) >= 8 and one.digest.startswith(text))


def _places(caches: ChunkStore) -> Iterator[tuple[str, Any]]:
    from blend.store.sources import places

    return places(caches.backend)


def _listed(caches: ChunkStore, tier: str | None) -> Iterator[Listed]:
    from blend.errors import ConfigError
    from blend.store import sources
    from blend.store.backend import CACHES

    held = dict(_places(caches))
    if tier is not None and tier not in held:
        raise ConfigError(f"this store has no tier {tier!r}; it has {', '.join(held)}")
    backend = held[tier] if tier else next(iter(held.values()))
    documents = {digest: document for one in sources.read_sources(caches).values() for digest, document in one.items()}
    pins, now = sources.pinned(caches.backend), time.time()
    for page in backend.listing(CACHES):
        for stored in page:
            yield _one(stored, documents, pins, now)


def _one(stored: Stored, documents: dict[str, str], pins: frozenset[str], now: float) -> Listed:
    from blend.store.names import key_of

    key = key_of(stored.name)
    age, document = max(0.0, now - stored.used), documents.get(key.digest, "")
    return Listed(key.digest, key.namespace, stored.nbytes, age, document, key.digest in pins)


def _tier_stats(name: str, backend: Any) -> dict[str, Any]:
    """What a tier holds, or why it does not say."""
    from blend.errors import StoreError
    from blend.store.backend import CACHES

    row: dict[str, Any] = {"tier": name, "place": backend.place}
    try:
        held = [stored for page in backend.listing(CACHES) for stored in page]
        ages = [max(0.0, time.time() - stored.used) for stored in held]
        row |= {"entries": len(held), "bytes": sum(stored.nbytes for stored in held)}
        row |= {"newest_s": min(ages, default=0.0), "oldest_s": max(ages, default=0.0)}
        if hasattr(backend, "hits") and name != "store":
            row["hits"], row["misses"] = backend.hits()
    except StoreError as error:
        row["error"] = str(error)
    return row


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"


def _age(seconds: float) -> str:
    for unit, length in (("d", _DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
