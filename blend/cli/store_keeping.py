"""`blend store prune`, `pin`, `unpin`: which caches go, and which stay."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blend.cli import options
from blend.cli.store_caches import DAY_S, Listed, in_bytes, list_caches, open_caches, tiers_of
from blend.cli.values import number

if TYPE_CHECKING:
    from blend.store import ChunkStore
    from blend.store.sources import Sources

_NEW_S = 3600.0  # a process that has put it may not have told yet whose it is
_AT_ONCE = 500


@click.command("prune")
@options.store_option
@options.store_key_option
@number("--older-than", "older_than", "Remove what was not used, or where that is not known put, for so many days.")
@click.option(
    "--unused",
    is_flag=True,
    help="Remove what no document of any corpus is cached in, for an hour at least, of models that a corpus was made with.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune(store: Path, store_key: Path | None, older_than: float | None, unused: bool, dry_run: bool) -> None:
    """Remove chunk caches from every tier; pinned ones stay. With both options, what both say."""
    from blend.cli.console import say
    from blend.errors import ConfigError

    if older_than is None and not unused:
        raise ConfigError("say what is to go: --older-than DAYS, --unused or both")
    caches = open_caches(store, store_key)
    told = _told(store, caches, unused=unused)
    held = list(list_caches(caches))
    # A note of before does not say which namespaces it speaks of: those that something of it is in.
    known = told.namespaces | {one.namespace for one in held if one.document} if unused else frozenset()
    going = [
        one
        for one in held
        if not one.pinned
        and (older_than is None or one.age_s > older_than * DAY_S)
        and not (unused and (one.document or one.age_s < _NEW_S or one.namespace not in known))
    ]
    done = "would go" if dry_run else "removed"
    gone = going if dry_run else list(chain.from_iterable(_removed(store, caches, going, unused=unused)))
    say(f"{len(gone):,} caches {done}, {in_bytes(sum(one.nbytes for one in gone))}")


def _removed(store: Path, caches: ChunkStore, going: list[Listed], *, unused: bool) -> Iterator[list[Listed]]:
    """What goes of these: a precompute or a pin may have come since they were listed, and comes between two batches."""
    from blend.store import sources

    for begin in range(0, len(going), _AT_ONCE):
        with caches.writing():
            documents = _told(store, caches, unused=unused).documents if unused else {}
            pins = sources.pinned(caches.backend)
            batch = [
                one for one in going[begin : begin + _AT_ONCE] if one.digest not in documents and one.digest not in pins
            ]
            for one in batch:
                caches.delete(sources.key_of(one.namespace, one.digest))
        yield batch


def _told(store: Path, caches: ChunkStore, *, unused: bool) -> Sources:
    """What is known of which document each cache is of; with `unused` of all corpora, or it raises `StoreError`."""
    from blend.corpora import in_words
    from blend.errors import StoreError
    from blend.store.sources import read_sources

    told = read_sources(caches)
    if not unused:
        return told
    remedy = "nothing is removed; run `blend precompute` for it again"
    if told.unread:
        raise StoreError(
            f"{told.unread[0]}, the note of a corpus's caches, is damaged or of another --store-key: {remedy}"
        )
    for name in sorted(_corpora(store, caches) - told.corpora):
        raise StoreError(f"the store says nowhere which caches the corpus ({in_words(name)}) uses: {remedy}")
    return told


def _corpora(store: Path, caches: ChunkStore) -> set[str]:
    """Those that are there: of a shared store, that all see."""
    from blend.corpora import corpora
    from blend.sharing import published
    from blend.store.replica import root_of

    return set(corpora(store) if root_of(store) is None else published(caches))


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
