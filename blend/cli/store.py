"""`blend store`: look at the chunk caches of a store, verify them, remove them and pin them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from blend.cli import opening, options
from blend.cli.console import make_sure, print_json, say, seconds
from blend.cli.options import number
from blend.cli.progress import counting
from blend.corpora import complete_sources, corpora, in_words
from blend.errors import ConfigError, EntryDamagedError, StoreError
from blend.store import ChunkReader, open_store
from blend.store.addresses import root_of, store_name
from blend.store.admin import read_sources, remove_copies, verify_entry
from blend.store.backend import CACHES, cache_name, in_batches, key_of, pin_cache, pinned
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.store import Backend, ChunkStore

_REFUSED = "nothing is removed"
_DAY_S = 86400.0
_NEW_S = 3600.0  # the process that put a cache may not have noted its document yet
_BATCH = 500
_AT_ONCE = 16  # downloads
_POLL_S = 1.0
_ARTIFACTS = {
    "correction": "KV correction",
    "quality": "estimates of quality",
    "surrogate": "surrogate context",
    "fit": "unfinished fit of a KV correction",
}
_SHORTEST_DIGEST = 8  # characters of a digest that name a cache


class Listed(NamedTuple):
    """A cache as `ls` shows it. age_s: since its last use if the tier knows it, else since it was put."""

    digest: str
    namespace: str
    nbytes: int
    age_s: float
    document: str
    pinned: bool


@click.group("store", invoke_without_command=True)
@options.store_and_key
@options.json_option
@click.pass_context
def command(ctx: click.Context, store: Path, store_key: Path | None, as_json: bool) -> None:
    """Show which models a store holds caches for, and how many; the commands below show and change more."""
    if ctx.invoked_subcommand is not None:
        early = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if early:
            raise click.UsageError(
                f"give the options behind the command: blend store {ctx.invoked_subcommand} --store ..."
            )
        return

    opening.fetch_indexes(store, store_key)
    caches = _open_caches(store, store_key)
    stats = caches.stats()
    described = dict(sorted(caches.namespaces().items()))
    namespaces = [{"caches": len(list(caches.keys(name))), **words} for name, words in described.items()]
    names = corpora(store)
    artifacts = caches.artifacts()
    if as_json:
        whole = {"entries": stats.entries, "bytes": stats.nbytes, "corpora": names, "namespaces": namespaces}
        print_json({**whole, "artifacts": artifacts})
        return
    say(f"{store_name(store)}: {stats.entries:,} chunk caches, {_size(stats.nbytes)}")
    if any(names):
        say(f"  corpora: {', '.join(map(in_words, names))}")
    for name, words in zip(described, namespaces, strict=True):
        if words["caches"]:
            say(f"  {_describe(words)}{_fitted(artifacts, name)}")


@command.command()
@options.store_and_key
@click.option("--tier", metavar="NAME", help="Of this tier, as `stats` names it.  [default: the one that has all]")
@options.json_option
def ls(store: Path, store_key: Path | None, tier: str | None, as_json: bool) -> None:
    """List the chunk caches: digest, size, age, document; a * marks a pinned one."""
    for cache in _list_caches(_open_caches(store, store_key), tier):
        if as_json:
            print_json(cache._asdict())
        else:
            mark = "*" if cache.pinned else " "
            say(
                f"{cache.digest[:16]}{mark} {_size(cache.nbytes):>9} {seconds(cache.age_s):>9}  {cache.document or '-'}"
            )


@command.command()
@options.store_and_key
@options.json_option
def stats(store: Path, store_key: Path | None, as_json: bool) -> None:
    """Show what each tier holds: caches, bytes, ages."""
    rows = [_tier_stats(name, backend) for name, backend in _open_caches(store, store_key).backend.tiers.items()]
    if as_json:
        print_json({"tiers": rows})
        return
    for row in rows:
        text = row.get("error") or f"{row['entries']:,} caches, {_size(row['bytes'])}"
        if row.get("entries"):
            text += f", last used {seconds(row['newest_s'])} to {seconds(row['oldest_s'])} ago"
        say(f"{row['tier']:<6} {row['place']}: {text}")


@command.command()
@options.store_and_key
@click.option("--delete", is_flag=True, help="Remove what is damaged; it is computed again on use.")
def verify(store: Path, store_key: Path | None, delete: bool) -> None:
    """Read every cache of every tier and check it against its digests; fail where damage is left."""
    caches = _open_caches(store, store_key)
    if delete:
        caches.require_its_key()  # what another key sealed is not damaged
    damaged: list[tuple[Backend, str]] = []
    problems: list[str] = []
    entries = [
        (tier, backend, name) for tier, backend in caches.backend.tiers.items() for name in backend.names(CACHES)
    ]
    checked = len(entries)
    try:
        with counting("Verifying caches", "caches", checked) as count:
            for number, (tier, backend, name) in enumerate(entries, 1):
                if problem := verify_entry(caches.over(backend), name):
                    damaged.append((backend, name))
                    problems.append(f"{tier}: {problem}")
                count(number)
    finally:  # not under the bar; also after Ctrl-C
        for problem in problems:
            say(problem)
    if damaged and len(damaged) == checked and not caches.check_key():
        raise StoreError(
            f"none of {checked:,} caches is what was written, so nothing is removed: is --store-key missing, or another one? "
            "If they are damaged indeed, `blend store clear` removes them"
        )
    if damaged and not delete:
        raise StoreError(
            f"{len(damaged):,} of {checked:,} caches are damaged: remove them with --delete, they are computed again"
        )
    for backend, name in damaged:
        backend.delete(name)
    say(f"{checked:,} caches read, {len(damaged):,} damaged{' and removed' if damaged else ''}")


@command.command()
@options.store_and_key
@click.option("--yes", is_flag=True, help="Do not ask first.")
def clear(store: Path, store_key: Path | None, yes: bool) -> None:
    """Remove every chunk cache but pinned ones from every tier; the index stays, caches are computed again on use."""
    caches = _open_caches(store, store_key)
    make_sure(f"the chunk caches of {store_name(store)}", sure=yes)
    removed = sum(caches.prune((), namespace) for namespace in caches.namespaces())
    remove_copies(caches.backend)
    say(f"{removed:,} caches removed")


@command.command()
@options.store_and_key
@number("older_than", "Remove what was not used, or where that is not known put, for so many days.")
@click.option(
    "--unused",
    is_flag=True,
    help="Remove what no document of any corpus is cached in, for an hour at least, of models that a corpus was made with.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune(store: Path, store_key: Path | None, older_than: float | None, unused: bool, dry_run: bool) -> None:
    """Remove chunk caches from every tier; pinned ones stay. With both options, what both say."""
    if older_than is None and not unused:
        raise ConfigError("say what is to go: --older-than DAYS, --unused or both")
    caches = _open_caches(store, store_key)
    sources = complete_sources(caches, store, _REFUSED) if unused else read_sources(caches)
    going = [
        cache
        for cache in _list_caches(caches)
        if not cache.pinned
        and cache.age_s > (older_than or 0) * _DAY_S
        and not (unused and (cache.document or cache.age_s < _NEW_S or cache.namespace not in sources.namespaces))
    ]
    outcome = "would go" if dry_run else "removed"
    if not dry_run:
        going = _removed(store, caches, going, unused=unused)
    say(f"{len(going):,} caches {outcome}, {_size(sum(cache.nbytes for cache in going))}")
    if copies := remove_copies(caches.backend, dry_run=dry_run):
        say(f"{copies:,} copies in nearer tiers of caches that were gone {outcome}")


@command.command()
@click.argument("names", nargs=-1, required=True)
@options.store_and_key
def pin(names: tuple[str, ...], store: Path, store_key: Path | None) -> None:
    """Keep the caches of these documents, named as `ls` does, or with these digests: never pruned, never evicted from a disk.

    They are fetched to the disk of this machine. Removing the document removes them all the same.
    """
    caches = _open_caches(store, store_key)
    chosen = [cache for cache in _list_caches(caches) if _is_named(cache.digest, cache.document, names)]
    digests = {cache.digest for cache in chosen}
    _require_all(names, {cache.document for cache in chosen} | digests)
    _set_pins(caches, digests, on=True)
    say(f"{len(digests):,} caches pinned{_fetched(caches, chosen)}")


@command.command()
@click.argument("names", nargs=-1, required=True)
@options.store_and_key
def unpin(names: tuple[str, ...], store: Path, store_key: Path | None) -> None:
    """Let them go again."""
    caches = _open_caches(store, store_key)
    documents = read_sources(caches).documents
    pins = pinned(caches.backend)  # also of caches that are gone
    _require_all(names, {*documents, *documents.values(), *pins})
    digests = {digest for digest in pins if _is_named(digest, documents.get(digest, ""), names)}
    _set_pins(caches, digests, on=False)
    say(f"{len(digests):,} caches let go")


def _open_caches(store: Path, store_key: Path | None) -> ChunkStore:
    """The caches of a store, which must exist. Raises `StoreError`."""
    if root_of(store) is None and not (store / "kv").is_dir():
        raise StoreError(f"{store} holds no chunk caches; make some with `blend precompute PATH --store {store}`")
    return open_store(store / "kv", key=opening.store_key(store_key))


def _list_caches(caches: ChunkStore, tier: str | None = None) -> Iterator[Listed]:
    """The caches of a tier; without a name of the one that has all of them. Raises `ConfigError` for an unknown one."""
    tiers = caches.backend.tiers
    if tier is not None and tier not in tiers:
        raise ConfigError(f"this store has no tier {tier!r}: name {' or '.join(tiers)}")
    backend = tiers[tier] if tier is not None else next(iter(tiers.values()))
    documents = read_sources(caches).documents
    pins = pinned(caches.backend)
    now = time.time()
    for stored in backend.listing(CACHES):
        namespace, digest = key_of(stored.name)
        age_s = max(0.0, now - stored.used)
        yield Listed(digest, namespace, stored.nbytes, age_s, documents.get(digest, ""), digest in pins)


def _tier_stats(name: str, backend: Backend) -> dict[str, Any]:
    """What a tier holds, or why it does not answer."""
    row: dict[str, Any] = {"tier": name, "place": backend.place}
    try:
        caches = list(backend.listing(CACHES))
    except StoreError as error:
        return row | {"error": str(error)}
    ages = [max(0.0, time.time() - stored.used) for stored in caches]
    row |= {"entries": len(caches), "bytes": sum(stored.nbytes for stored in caches)}
    return row | {"newest_s": min(ages, default=0.0), "oldest_s": max(ages, default=0.0)}


def _removed(store: Path, caches: ChunkStore, going: list[Listed], *, unused: bool) -> list[Listed]:
    """Remove these in batches. Before each batch, leave out what a precompute or a pin has claimed since they were listed."""
    removed: list[Listed] = []
    with counting("Removing caches", "caches", len(going)) as count:
        for begin in range(0, len(going), _BATCH):
            batch = going[begin : begin + _BATCH]
            with caches.writing():
                claimed = set(pinned(caches.backend))
                if unused:
                    claimed.update(complete_sources(caches, store, _REFUSED).documents)
                free = [cache for cache in batch if cache.digest not in claimed]
                for number, cache in enumerate(free, 1):
                    caches.delete(ChunkKey(cache.namespace, cache.digest))
                    count(begin + number)
            removed += free
    return removed


def _is_named(digest: str, document: str, names: Sequence[str]) -> bool:
    """Whether one of the names is the document's, or begins the digest."""
    return document in names or any(len(name) >= _SHORTEST_DIGEST and digest.startswith(name) for name in names)


def _require_all(names: Sequence[str], existing: Collection[str]) -> None:
    """Raise `ConfigError` for names that are no document of these, and begin no digest of these."""
    missing = [name for name in names if not any(_is_named(word, word, [name]) for word in existing)]
    if missing:
        words = ", ".join(f"{name!r:.80}" for name in missing)
        raise ConfigError(f"no cache is of such a document or has such a digest: {words}; `blend store ls` shows them")


def _set_pins(caches: ChunkStore, digests: Collection[str], *, on: bool) -> None:
    caches.require_its_key()
    with caches.writing():
        for digest in sorted(digests):
            pin_cache(caches.backend, digest, on=on)


def _fetched(caches: ChunkStore, chosen: list[Listed]) -> str:
    """Fetch these to this machine's disk tier, if there is one; says how many are there then."""
    local = caches.backend.tiers.get("local")
    if local is None:
        return ""
    keys = [ChunkKey(cache.namespace, cache.digest) for cache in chosen]
    try:
        with counting("Fetching caches", "caches", len(keys)) as count:
            for batch in in_batches(list(enumerate(keys, 1)), _AT_ONCE):
                for (number, _), reader in zip(batch, caches.open_many([key for _, key in batch]), strict=True):
                    if isinstance(reader, ChunkReader):
                        with reader, suppress(EntryDamagedError):
                            reader.layer(0)  # a server's cache comes whole
                    count(number)
            while not caches.backend.wait(_POLL_S):
                pass
        near = set(local.names(CACHES))
    except StoreError as error:
        return f", none on this machine's disk: {error}"
    return f", {sum(cache_name(key) in near for key in keys):,} of them on this machine's disk"


def _describe(words: Mapping[str, Any]) -> str:
    model = words.get("model", "unknown model")
    dtype = words.get("dtype", "?")
    kind = "contextual" if "contextual" in words else "isolated"
    return f"{model}, {dtype}, prefix of {words.get('prefix_tokens', '?')} tokens: {words['caches']:,} {kind} caches"


def _fitted(artifacts: Sequence[str], namespace: str) -> str:
    """What was fitted to the caches of a namespace, and of which corpora if they have names."""
    corpora_of: dict[str, list[str]] = {}
    for artifact in artifacts:
        kind, *rest_of_name = artifact.split("-", 2)
        if not rest_of_name:
            continue
        of_namespace, *corpus = rest_of_name
        words = _ARTIFACTS.get(kind.partition("_")[0])
        if words and of_namespace == namespace:
            corpora_of.setdefault(words, []).extend(corpus)
    fits = [f"{words} ({', '.join(sorted(set(names)))})" if names else words for words, names in corpora_of.items()]
    return "".join(f"; {fit}" for fit in fits)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"
