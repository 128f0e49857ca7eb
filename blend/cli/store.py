"""`blend store`: what is in a store, and room again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from blend.cli import opening, options
from blend.cli.store import export, import_, ls, open_caches, pin, prune, stats, unpin, verify
from blend.corpora import corpora, in_words

if TYPE_CHECKING:
    from blend.store import ChunkStore


@click.group("store", invoke_without_command=True)
@options.store_option
@options.store_key_option
@click.option(
    "--clear",
    is_flag=True,
    help="Remove every chunk cache but pinned ones (the index stays; caches are computed again on use).",
)
@click.option("--yes", is_flag=True, help="Do not ask first.")
@options.json_option
@click.pass_context
def command(ctx: click.Context, store: Path, store_key: Path | None, clear: bool, yes: bool, as_json: bool) -> None:
    """Show which models a store holds caches for, and how many; the commands below show and change more."""
    if ctx.invoked_subcommand is not None:
        given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(
                f"give the options behind the command: blend store {ctx.invoked_subcommand} --store ..."
            )
        return
    from blend.cli.console import make_sure, print_json, say
    from blend.store.admin import remove_copies

    opening.fetch_indexes({"store": store, "store_key": store_key})
    caches = open_caches(store, store_key)
    if clear:
        make_sure(f"the chunk caches of {store}", sure=yes)
        for namespace in caches.namespaces():
            caches.prune((), namespace)
        remove_copies(caches.backend)
    held = caches.stats()
    described = sorted(caches.namespaces().items())
    namespaces = [{"caches": sum(1 for _ in caches.keys(name)), **words} for name, words in described]
    artifacts = [{"name": name, "content": _content(caches, name)} for name in sorted(caches.artifacts())]
    names = corpora(store)
    if as_json:
        whole = {"entries": held.entries, "bytes": held.nbytes, "corpora": names}
        print_json({**whole, "namespaces": namespaces, "artifacts": artifacts})
        return
    say(f"{store}: {held.entries:,} chunk caches, {held.nbytes / 1e6:,.0f} MB")
    if any(names):
        say(f"  corpora: {', '.join(map(in_words, names))}")
    for words in namespaces:
        say(f"  {_describe(words)}: {_held(words)}")
    for artifact in artifacts:
        say(f"  {artifact['content']}")


for _command in (ls, stats, verify, prune, pin, unpin, export, import_):
    command.add_command(_command)


def _content(caches: ChunkStore, name: str) -> str:
    """What an artifact is, in words."""
    from blend.chunks.surrogate import read_surrogate

    corpus = name.split("-", 2)[2:]
    whose = f", corpus {corpus[0]}" if corpus else ""
    if name.startswith("correction_first-"):
        return f"KV correction for the first place{whose}"
    if name.startswith("correction-"):
        return f"KV correction{whose}"
    if name.startswith("probe-"):
        return "probe of the model's KV, for engines that would share its caches"
    if not name.startswith("surrogate-"):
        return name
    found = read_surrogate(caches, name, sys.maxsize)
    tokens = sum(map(len, found.chunks))
    if found.problems:
        return found.problems[0]
    copies = ", one cache a chunk" if found.one_copy else ""
    return (f"surrogate context of {tokens:,} tokens{copies}" if tokens else "no surrogate context") + whose


def _held(words: dict[str, Any]) -> str:
    return f"{words['caches']:,} {'contextual' if 'contextual' in words else 'isolated'} caches"


def _describe(words: dict[str, Any]) -> str:
    model, dtype, prefix = words.get("model", "unknown model"), words.get("dtype", "?"), words.get("prefix_tokens", "?")
    return f"{model}, {dtype}, prefix of {prefix} tokens"
