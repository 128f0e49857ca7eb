"""`blend corpus`: text to try kvblend on that is on every machine."""

from __future__ import annotations

from pathlib import Path

import click

from blend.cli.console import say
from blend.cli.options import FOLDER, NAME
from blend.text import counted


@click.command("corpus")
@click.argument("folder", type=FOLDER)
@click.option(
    "--module", "modules", type=NAME, multiple=True, help="A standard-library module; repeat it. Default: some forty."
)
def command(folder: Path, modules: tuple[str, ...]) -> None:
    """Write Python's own documentation to FOLDER, one Markdown document a module."""
    from blend_retrieval import write_stdlib_corpus

    written = write_stdlib_corpus(folder, modules or None)
    say(f"{counted(len(written), 'document')} in {folder}")
