"""`blend selectors`: the selectors and their parameters."""

from __future__ import annotations

import click

from blend.cli import options
from blend.cli.console import print_json, say
from blend.config import BlendConfig
from blend.select import SELECTORS
from blend.select.base import MEANINGS, allowed, defaults, parameters, summary, written


@click.command("selectors")
@options.json_option
def command(as_json: bool) -> None:
    """List the selectors that --selector and BlendConfig take, as NAME or NAME:key=value,key=value.

    For example query_guided:layers=4-9,block=8 or mixed:rule=zsum,prefilter=2. A parameter means the same in every
    selector that has it; a missing one is at its default.
    """
    if as_json:
        print_json({"default": BlendConfig().plain()["selector"], "selectors": listed()})
        return
    for name, kind in SELECTORS.items():
        say(f"{name:14}{summary(kind)}{'; the default' if name == BlendConfig().selector else ''}")
        if parameters(kind):
            say(f"{'':14}{defaults(kind)}")
    say()
    for name, words, values in explained():
        say(f"{name:14}{words}  [{values}]")


def listed() -> list[dict[str, object]]:
    """The selectors as JSON values; a parameter's default as a spec has it."""
    return [
        {
            "name": name,
            "summary": summary(kind),
            "parameters": {field.name: written(field.default) for field in parameters(kind)},
        }
        for name, kind in SELECTORS.items()
    ]


def explained() -> list[tuple[str, str, str]]:
    """Every parameter's name, what it means and what it may be."""
    kinds = {field.name: kind for kind in SELECTORS.values() for field in parameters(kind)}
    return [(name, words, allowed(kinds[name], name)) for name, words in MEANINGS.items()]
