"""`blend store`: what is in a store, and room again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from blend.cli import options


@click.command("store")
@options.store_option
@click.option(
    "--clear", is_flag=True, help="Remove every chunk cache (the index stays; caches are computed again on use)."
)
@options.json_option
def command(store: Path, clear: bool, as_json: bool) -> None:
    """Show which models a store holds caches for, and how many."""
    from blend.cli.console import print_json, say
    from blend.errors import StoreError
    from blend.store import open_store

    if not (store / "kv").is_dir():
        raise StoreError(f"{store} holds no chunk caches; make some with `blend precompute PATH --store {store}`")
    caches = open_store(store / "kv")
    if clear:
        for key in list(caches.keys()):
            caches.delete(key)
    stats = caches.stats()
    described = dict(sorted(caches.namespaces().items(), key=lambda entry: (entry[1].get("content", ""), entry[0])))
    namespaces = [{"caches": sum(1 for _ in caches.keys(name)), **_counted(words)} for name, words in described.items()]
    if as_json:
        print_json({"entries": stats.entries, "bytes": stats.nbytes, "namespaces": namespaces})
        return
    maps = sum(1 for name, words in described.items() if "content" in words for _ in caches.keys(name))
    say(f"{store}: {stats.entries - maps:,} chunk caches, {stats.nbytes / 1e6:,.0f} MB")
    for words in namespaces:
        say(f"  {_describe(words)}: {_held(words)}")


def _counted(words: dict[str, str]) -> dict[str, Any]:
    """A stand-in is described by its tokens; how many they are is enough here."""
    if "tokens" not in words:
        return dict(words)
    return {**words, "tokens": sum(len(chunk.split(",")) for chunk in words["tokens"].split(";") if chunk)}


def _held(words: dict[str, Any]) -> str:
    if "tokens" in words:
        return f"stand-in of {words['tokens']:,} tokens" if words["tokens"] else "no stand-in"
    held = words.get("content") or f"{words['caches']:,} caches"
    return f"{held} in company" if "company" in words else held


def _describe(words: dict[str, Any]) -> str:
    model, dtype, prefix = words.get("model", "unknown model"), words.get("dtype", "?"), words.get("prefix_tokens", "?")
    return f"{model}, {dtype}, prefix of {prefix} tokens"
