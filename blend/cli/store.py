"""`blend store`: what is in a store, and room again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command("store")
@click.option("--store", "root", type=click.Path(path_type=Path), default=Path(".kvblend"), show_default=True)
@click.option(
    "--clear", is_flag=True, help="Remove every chunk cache (the index stays; caches are computed again on use)."
)
def command(root: Path, clear: bool) -> None:
    """Show which models a store holds caches for, and how many."""
    from blend.errors import StoreError
    from blend.store import open_store

    if not (root / "kv").is_dir():
        raise StoreError(f"{root} holds no chunk caches; make some with `blend precompute PATH --store {root}`")
    store = open_store(root / "kv")
    if clear:
        for key in list(store.keys()):
            store.delete(key)
    stats = store.stats()
    click.echo(f"{root}: {stats.entries} chunk caches, {stats.nbytes / 1e6:.0f} MB")
    for namespace, words in store.namespaces().items():
        click.echo(f"  {_describe(words)}: {sum(1 for _ in store.keys(namespace))} caches")


def _describe(words: dict[str, Any]) -> str:
    model, dtype, prefix = words.get("model", "unknown model"), words.get("dtype", "?"), words.get("prefix_tokens", "?")
    return f"{model}, {dtype}, prefix of {prefix} tokens"
