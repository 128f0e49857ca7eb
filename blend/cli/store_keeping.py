"""`blend store prune`, `pin`, `unpin`: which caches go, and which stay."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from blend.cli import options
from blend.cli.store import DAY_S, Listed, in_bytes, list_caches, open_caches
from blend.cli.values import number

if TYPE_CHECKING:
    from blend.store import ChunkStore
    from blend.store.admin import Sources

_NEW_S = 3600.0  # a process that has put it may not have told yet whose it is
_AT_ONCE = 500
_FETCHED_AT_ONCE = 16
_LOOK_EVERY_S = 1.0
_SHORTEST = 8  # of the beginning of a digest


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
    from blend.store.admin import remove_copies

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
    if copies := remove_copies(caches.backend, dry_run=dry_run):
        say(f"{copies:,} copies in nearer tiers of caches that were gone {done}")


def _removed(store: Path, caches: ChunkStore, going: list[Listed], *, unused: bool) -> Iterator[list[Listed]]:
    """What goes of these: a precompute or a pin may have come since they were listed, and comes between two batches."""
    from blend.store.admin import key_of, still_pinned

    for begin in range(0, len(going), _AT_ONCE):
        with caches.writing():
            documents = _told(store, caches, unused=unused).documents if unused else {}
            batch = [one for one in going[begin : begin + _AT_ONCE] if one.digest not in documents]
            pins = still_pinned(caches.backend, [one.digest for one in batch])
            batch = [one for one in batch if one.digest not in pins]
            for one in batch:
                caches.delete(key_of(one.namespace, one.digest))
        yield batch


def _told(store: Path, caches: ChunkStore, *, unused: bool) -> Sources:
    """What is known of which document each cache is of; with `unused` of all corpora, or it raises `StoreError`."""
    from blend.corpora import in_words
    from blend.errors import StoreError
    from blend.store.admin import read_sources

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
    from blend.store.addresses import root_of

    return set(corpora(store) if root_of(store) is None else published(caches))


@click.command("pin")
@click.argument("names", nargs=-1, required=True)
@options.store_option
@options.store_key_option
def pin(names: tuple[str, ...], store: Path, store_key: Path | None) -> None:
    """Keep the caches of these documents, named as `ls` does, or with these digests: never pruned, never evicted from a disk.

    They are fetched to the disk of this machine. To remove the document removes them all the same.
    """
    _pin(names, open_caches(store, store_key), on=True)


@click.command("unpin")
@click.argument("names", nargs=-1, required=True)
@options.store_option
@options.store_key_option
def unpin(names: tuple[str, ...], store: Path, store_key: Path | None) -> None:
    """Let them go again."""
    _pin(names, open_caches(store, store_key), on=False)


def _pin(wanted: tuple[str, ...], caches: ChunkStore, *, on: bool) -> None:
    from blend.cli.console import say
    from blend.errors import ConfigError
    from blend.store.admin import pin, pinned

    held = list(list_caches(caches))
    found = {one.digest: one for one in held if any(_is(one, text) for text in wanted)}
    digests = {*found}
    if not on:  # of a cache that is gone, too
        digests |= {digest for digest in pinned(caches.backend) if any(_begins(digest, text) for text in wanted)}
    lacking = [
        text
        for text in wanted
        if not any(_is(one, text) for one in found.values()) and not any(_begins(one, text) for one in digests)
    ]
    if lacking:
        names = ", ".join(f"{text!r:.80}" for text in lacking)
        raise ConfigError(f"no cache is of such a document or has such a digest: {names}; `blend store ls` shows them")
    caches.require_its_key()
    with caches.writing():
        for digest in sorted(digests):
            pin(caches.backend, digest, on=on)
    here = _fetched(caches, list(found.values())) if on else ""
    say(f"{len(digests):,} caches {'pinned' if on else 'let go'}{here}")


def _fetched(caches: ChunkStore, wanted: list[Listed]) -> str:
    """Bring these to the disk of this machine, where there is one in front of the store; how many are on it then."""
    from blend.cli.progress import stage_progress
    from blend.errors import StoreError
    from blend.store.admin import key_of
    from blend.store.backend import CACHES, cache_name
    from blend.store.tiered import TieredBackend

    backend = caches.backend
    if not isinstance(backend, TieredBackend) or backend.tiers.local is None:
        return ""
    keys = [key_of(one.namespace, one.digest) for one in wanted]
    with stage_progress() as progress:
        for begin in range(0, len(keys), _FETCHED_AT_ONCE):  # what is under way is in memory
            caches.prefetch(keys[begin : begin + _FETCHED_AT_ONCE])
            while not backend.wait(_LOOK_EVERY_S):
                progress("fetch", begin, len(keys))
            progress("fetch", min(begin + _FETCHED_AT_ONCE, len(keys)), len(keys))
    try:
        near = {name for page in backend.tiers.local.names(CACHES) for name in page}
    except StoreError as error:
        return f", none on this machine's disk: {error}"
    return f", {len(near.intersection(map(cache_name, keys))):,} of them on this machine's disk"


def _is(one: Listed, text: str) -> bool:
    return one.document == text or _begins(one.digest, text)


def _begins(digest: str, text: str) -> bool:
    return len(text) >= _SHORTEST and digest.startswith(text)
