"""`blend store ls`, `stats`, `verify`, `export`, `import`: over every tier of a store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.store import in_bytes, in_time, list_caches, open_caches, tiers_of
from blend.cli.values import OUTPUT, PLACE
from blend.corpora import corpora
from blend.store.addresses import root_of

if TYPE_CHECKING:
    from blend.store import Backend

_ANEW = "`blend precompute PATH --store {}` makes it and uses the caches that are there"
_TIERS = ("far", "hot", "local")


@click.command("ls")
@options.store_option
@options.store_key_option
@click.option("--tier", type=click.Choice(_TIERS), help="Of which tier.  [default: the one that decides]")
@options.json_option
def ls(store: Path, store_key: Path | None, tier: str | None, as_json: bool) -> None:
    """List the chunk caches: digest, size, age, hits on this machine, document; a * where one is pinned."""
    from blend.cli.console import print_json, say

    for one in list_caches(open_caches(store, store_key), tier):
        if as_json:
            print_json(one._asdict())
        else:
            mark = "*" if one.pinned else " "
            size, age = in_bytes(one.nbytes), in_time(one.age_s)
            say(f"{one.digest[:16]}{mark} {size:>9} {age:>8} {_hits(one.hits):>9}  {one.document or '-'}")


@click.command("stats")
@options.store_option
@options.store_key_option
@options.json_option
def stats(store: Path, store_key: Path | None, as_json: bool) -> None:
    """Show what each tier holds: caches, bytes, ages, and how often this machine has read from it for a prompt."""
    from blend.cli.console import print_json, say

    caches = open_caches(store, store_key)
    uses = caches.backend.uses
    hits = {} if uses is None else uses.read().of_tiers
    rows = [_tier_stats(name, backend, hits.get(name, 0)) for name, backend in tiers_of(caches)]
    in_memory = hits.get("memory", 0)
    if as_json:
        print_json({"tiers": rows, "hits_in_memory": in_memory})
        return
    for row in rows:
        say(f"{row['tier']:<6} {row['place']}: {row.get('error') or _in_words(row)}")
    if in_memory:
        say(f"memory of this machine's servers: {_hits(in_memory)}")


@click.command("verify")
@options.store_option
@options.store_key_option
@click.option("--delete", is_flag=True, help="Remove what is damaged; it is computed again on use.")
def verify(store: Path, store_key: Path | None, delete: bool) -> None:
    """Read every cache of every tier and hold it against its digests; an error where damage is left."""
    from blend.cli.console import say
    from blend.errors import StoreError
    from blend.store.admin import verify_entry
    from blend.store.backend import CACHES

    caches, checked = open_caches(store, store_key), 0
    damaged: list[tuple[Backend, str]] = []
    for tier, backend in tiers_of(caches):
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


@click.command("export")
@click.argument("file", type=OUTPUT)
@options.store_option
@options.store_key_option
def export(file: Path, store: Path, store_key: Path | None) -> None:
    """Write all caches, and of a shared store the indexes, into one tar file, as they are."""
    from blend.cli.console import note, say
    from blend.store.admin import export_store

    done = export_store(open_caches(store, store_key), file)
    if root_of(store) is None:
        note(f"{file} holds no index: after the import, {_ANEW.format('STORE')}")
    say(f"{file}: {done.names:,} names, {in_bytes(done.nbytes)}")


@click.command("import")
@click.argument("file", type=PLACE)
@options.store_option
@options.store_key_option
def import_(file: Path, store: Path, store_key: Path | None) -> None:
    """Put what `export` wrote into a store, every cache verified; one that is there is replaced."""
    from blend.cli.console import note, say
    from blend.store import open_store
    from blend.store.admin import import_store

    done = import_store(lambda: open_store(store / "kv", key=opening.store_key({"store_key": store_key})), file)
    if root_of(store) is None and not corpora(store):
        note(f"{store} has no index yet: {_ANEW.format(store)}")
    for line in done.refused:
        note(f"left out: {line}")
    say(f"{done.names:,} names, {in_bytes(done.nbytes)}; {len(done.refused):,} left out")


def _in_words(row: dict[str, Any]) -> str:
    ages = f", last used {in_time(row['newest_s'])} to {in_time(row['oldest_s'])} ago" if row["entries"] else ""
    server = ""
    if "server_hits" in row:
        server = f"; the whole server: {_hits(row['server_hits'])}, {row['server_misses']:,} misses"
    return f"{row['entries']:,} caches, {in_bytes(row['bytes'])}{ages}, {_hits(row['hits'])} of this machine{server}"


def _hits(count: int) -> str:
    return f"{count:,} hit{'' if count == 1 else 's'}"


def _tier_stats(name: str, backend: Any, hits: int) -> dict[str, Any]:
    """What a tier holds, or why it does not say."""
    from blend.errors import StoreError
    from blend.store.backend import CACHES

    row: dict[str, Any] = {"tier": name, "place": backend.place, "hits": hits}
    try:
        held = [stored for page in backend.listing(CACHES) for stored in page]
        ages = [max(0.0, time.time() - stored.used) for stored in held]
        row |= {"entries": len(held), "bytes": sum(stored.nbytes for stored in held)}
        row |= {"newest_s": min(ages, default=0.0), "oldest_s": max(ages, default=0.0)}
        if hasattr(backend, "server_hits"):
            row["server_hits"], row["server_misses"] = backend.server_hits()
    except StoreError as error:
        row["error"] = str(error)
    return row
