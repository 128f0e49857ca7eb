"""`blend store`: look at the chunk caches of a store, verify them, remove them and pin them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from blend.cli import opening, options
from blend.cli.console import make_sure, print_json, say
from blend.cli.options import number
from blend.corpora import complete_sources, corpora, in_words
from blend.errors import ConfigError, EntryDamagedError, StoreError
from blend.store import ChunkReader, open_store
from blend.store.addresses import root_of
from blend.store.admin import read_sources, remove_copies, verify_entry
from blend.store.backend import CACHES, cache_name, in_batches, key_of, pin_cache, pinned
from blend.types import ChunkKey

if TYPE_CHECKING:
    from blend.store import Backend, ChunkStore

_REFUSED = "nothing is removed"
_TIERS = ("far", "hot", "local")
_DAY_S = 86400.0
_NEW_S = 3600.0  # the process that put a cache may not have noted its document yet
_BATCH = 500
_AT_ONCE = 16  # downloads
_POLL_S = 1.0
_SHORTEST_DIGEST = 8  # characters of a digest that name a cache


class Listed(NamedTuple):
    """A cache as `ls` shows it. age_s: since its last use if the tier knows it, else since it was put."""

    digest: str
    namespace: str
    nbytes: int
    age_s: float
    document: str
    pinned: bool

    @property
    def key(self) -> ChunkKey:
        """Its key in the store."""
        return ChunkKey(self.namespace, self.digest)


@click.group("store", invoke_without_command=True)
@options.store_and_key
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    store: Path,
    store_key: Path | None,
    as_json: bool,
) -> None:
    """Show which models a store holds caches for, and how many; the commands below show and change more."""
    if ctx.invoked_subcommand is not None:
        early = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if early:
            raise click.UsageError(
                f"give the options behind the command: blend store {ctx.invoked_subcommand} --store ..."
            )
        return

    opening.fetch_indexes({"store": store, "store_key": store_key})
    caches = _open_caches(store, store_key)
    stats = caches.stats()
    described = dict(sorted(caches.namespaces().items()))
    namespaces = [{"caches": len(list(caches.keys(name))), **words} for name, words in described.items()]
    artifacts = [{"name": name, "content": _content(caches, name, described)} for name in sorted(caches.artifacts())]
    names = corpora(store)
    if as_json:
        whole = {"entries": stats.entries, "bytes": stats.nbytes, "corpora": names}
        print_json({**whole, "namespaces": namespaces, "artifacts": artifacts})
        return
    say(f"{store}: {stats.entries:,} chunk caches, {stats.nbytes / 1e6:,.0f} MB")
    if any(names):
        say(f"  corpora: {', '.join(map(in_words, names))}")
    for words in namespaces:
        if words["caches"]:
            say(f"  {_describe(words)}")
    for artifact in artifacts:
        say(f"  {artifact['content']}")


@command.command()
@options.store_and_key
@click.option("--tier", type=click.Choice(_TIERS), help="Of which tier.  [default: the one that decides]")
@options.json_option
def ls(
    store: Path,
    store_key: Path | None,
    tier: str | None,
    as_json: bool,
) -> None:
    """List the chunk caches: digest, size, age, document; a * marks a pinned one."""
    for cache in _list_caches(_open_caches(store, store_key), tier):
        if as_json:
            print_json(cache._asdict())
        else:
            mark = "*" if cache.pinned else " "
            say(f"{cache.digest[:16]}{mark} {_size(cache.nbytes):>9} {_age(cache.age_s):>8}  {cache.document or '-'}")


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
        ages = f", last used {_age(row['newest_s'])} to {_age(row['oldest_s'])} ago" if row.get("entries") else ""
        say(f"{row['tier']:<6} {row['place']}: {text}{ages}")


@command.command()
@options.store_and_key
@click.option("--delete", is_flag=True, help="Remove what is damaged; it is computed again on use.")
def verify(store: Path, store_key: Path | None, delete: bool) -> None:
    """Read every cache of every tier and check it against its digests; fail where damage is left."""
    caches = _open_caches(store, store_key)
    checked = 0
    damaged: list[tuple[Backend, str]] = []
    for tier, backend in caches.backend.tiers.items():
        tier_caches = caches.over(backend)
        for name in backend.names(CACHES):
            checked += 1
            if problem := verify_entry(tier_caches, name):
                damaged.append((backend, name))
                say(f"{tier}: {problem}")
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
    make_sure(f"the chunk caches of {store}", sure=yes)
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
def prune(
    store: Path,
    store_key: Path | None,
    older_than: float | None,
    unused: bool,
    dry_run: bool,
) -> None:
    """Remove chunk caches from every tier; pinned ones stay. With both options, what both say."""
    if older_than is None and not unused:
        raise ConfigError("say what is to go: --older-than DAYS, --unused or both")
    caches = _open_caches(store, store_key)
    sources = complete_sources(caches, store, _REFUSED) if unused else read_sources(caches)
    going = [
        cache
        for cache in _list_caches(caches)
        if not cache.pinned
        and (older_than is None or cache.age_s > older_than * _DAY_S)
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
def pin(
    names: tuple[str, ...],
    store: Path,
    store_key: Path | None,
) -> None:
    """Keep the caches of these documents, named as `ls` does, or with these digests: never pruned, never evicted from a disk.

    They are fetched to the disk of this machine. Removing the document removes them all the same.
    """
    _pin(names, _open_caches(store, store_key), on=True)


@command.command()
@click.argument("names", nargs=-1, required=True)
@options.store_and_key
def unpin(
    names: tuple[str, ...],
    store: Path,
    store_key: Path | None,
) -> None:
    """Let them go again."""
    _pin(names, _open_caches(store, store_key), on=False)


def _open_caches(store: Path, store_key: Path | None) -> ChunkStore:
    """The caches of a store, which must exist. Raises `StoreError`."""
    if root_of(store) is None and not (store / "kv").is_dir():
        raise StoreError(f"{store} holds no chunk caches; make some with `blend precompute PATH --store {store}`")
    return open_store(store / "kv", key=opening.store_key({"store_key": store_key}))


def _list_caches(caches: ChunkStore, tier: str | None = None) -> Iterator[Listed]:
    """The caches of a tier; default: the tier that has every cache. Raises `ConfigError` for a tier that does not exist."""
    tiers = caches.backend.tiers
    if tier is not None and tier not in tiers:
        raise ConfigError(f"this store has no tier {tier!r}; it has {', '.join(tiers)}")
    backend = tiers[tier] if tier else next(iter(tiers.values()))
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


def _removed(
    store: Path,
    caches: ChunkStore,
    going: list[Listed],
    *,
    unused: bool,
) -> list[Listed]:
    """Remove these in batches. Before each batch, leave out what a precompute or a pin has claimed since they were listed."""
    removed: list[Listed] = []
    for begin in range(0, len(going), _BATCH):
        with caches.writing():
            documents = complete_sources(caches, store, _REFUSED).documents if unused else {}
            batch = [cache for cache in going[begin : begin + _BATCH] if cache.digest not in documents]
            pins = pinned(caches.backend)
            batch = [cache for cache in batch if cache.digest not in pins]
            for cache in batch:
                caches.delete(cache.key)
        removed += batch
    return removed


def _pin(
    texts: tuple[str, ...],
    caches: ChunkStore,
    *,
    on: bool,
) -> None:
    chosen = [
        cache for cache in _list_caches(caches) if any(_names(text, cache.digest, cache.document) for text in texts)
    ]
    digests = {cache.digest for cache in chosen}
    if not on:  # a cache that is gone may still be pinned
        digests |= {digest for digest in pinned(caches.backend) if any(_names(text, digest) for text in texts)}
    documents = {cache.document for cache in chosen}
    missing = [text for text in texts if text not in documents and not any(_names(text, digest) for digest in digests)]
    if missing:
        names = ", ".join(f"{text!r:.80}" for text in missing)
        raise ConfigError(f"no cache is of such a document or has such a digest: {names}; `blend store ls` shows them")
    caches.require_its_key()
    with caches.writing():
        for digest in sorted(digests):
            pin_cache(caches.backend, digest, on=on)
    outcome = f"pinned{_fetched(caches, chosen)}" if on else "let go"
    say(f"{len(digests):,} caches {outcome}")


def _fetched(caches: ChunkStore, chosen: list[Listed]) -> str:
    """Fetch these to this machine's disk tier, if there is one; says how many are there then."""
    local = caches.backend.tiers.get("local")
    if local is None:
        return ""
    try:
        for batch in in_batches(chosen, _AT_ONCE):
            for reader in caches.open_many([cache.key for cache in batch]):
                if isinstance(reader, ChunkReader):
                    with reader, suppress(EntryDamagedError):
                        reader.layer(0)  # a server's cache comes whole
        while not caches.backend.wait(_POLL_S):
            pass
        near = set(local.names(CACHES))
    except StoreError as error:
        return f", none on this machine's disk: {error}"
    return f", {sum(cache_name(cache.key) in near for cache in chosen):,} of them on this machine's disk"


def _names(text: str, digest: str, document: str | None = None) -> bool:
    """Whether the text is the document's name or begins the digest."""
    return text == document or (len(text) >= _SHORTEST_DIGEST and digest.startswith(text))


def _content(
    caches: ChunkStore,
    name: str,
    described: Mapping[str, Mapping[str, str]],
) -> str:
    """An artifact's content, in words. described: the namespaces of the caches."""
    kind, *rest = name.split("-", 2)
    corrected = _kind(described.get(rest[0], {})) if rest else ""
    kinds = {
        "correction": f"KV correction of {corrected} caches",
        "quality": "estimates of quality",
        "probe": "probe of the model's KV, for engines that would share its caches",
    }
    words = kinds.get(kind, name)
    if kind == "surrogate":
        try:  # reads the JSON itself: the library of chunk caches would load torch
            tokens = sum(map(len, json.loads(caches.read_artifact(name) or b"")["chunks"]))
        except EntryDamagedError as error:
            return str(error)
        except (ValueError, KeyError, TypeError, RecursionError):
            return "a surrogate context that cannot be read"
        words = f"surrogate context of {tokens:,} tokens" if tokens else "no surrogate context"
    of_corpus = len(rest) > 1 and kind in {"correction", "quality", "surrogate"}
    return f"{words}, corpus {rest[1]}" if of_corpus else words


def _describe(words: Mapping[str, Any]) -> str:
    model = words.get("model", "unknown model")
    dtype = words.get("dtype", "?")
    number = f"{words['caches']:,}"
    return f"{model}, {dtype}, prefix of {words.get('prefix_tokens', '?')} tokens: {number} {_kind(words)} caches"


def _kind(words: Mapping[str, Any]) -> str:
    return "contextual" if "contextual" in words else "isolated"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"


def _age(seconds: float) -> str:
    for unit, length in (("d", _DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
