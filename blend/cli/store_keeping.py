"""`blend store prune`, `pin`, `unpin`: which caches go, and which stay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blend.cli import options
from blend.cli.store_caches import DAY_S, Listed, in_bytes, list_caches, open_caches, tiers_of
from blend.cli.values import number

if TYPE_CHECKING:
    from blend.store import ChunkStore


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
        for one in list_caches(caches)
        if not one.pinned and (older_than is None or one.age_s > older_than * DAY_S) and not (unused and one.document)
    ]
    for one in going if not dry_run else ():
        caches.backend.delete(f"{CACHES}{one.namespace}/{one.digest[:2]}/{one.digest}.safetensors")
    done = "would go" if dry_run else "removed"
    say(f"{len(going):,} caches {done}, {in_bytes(sum(one.nbytes for one in going))}")


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


def _pin(wanted: tuple[str, ...], caches: ChunkStore, *, on: bool) -> None:
    from blend.cli.console import say
    from blend.errors import ConfigError
    from blend.store import sources

    found = [one for one in list_caches(caches) if any(_is(one, text) for text in wanted)]
    if not found:
        raise ConfigError("no cache is of such a document or has such a digest: `blend store ls` shows them")
    if on:
        caches.prefetch(sources.key_of(one.namespace, one.digest) for one in found)
    for _, backend in tiers_of(caches):
        for one in found:
            sources.pin(backend, one.digest, on=on)
    say(f"{len(found):,} caches {'pinned' if on else 'let go'}")


def _is(one: Listed, text: str) -> bool:
    return one.document == text or (len(text) >= 8 and one.digest.startswith(text))
