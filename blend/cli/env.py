"""`blend env`: what a bug report needs."""

from __future__ import annotations

from dataclasses import asdict

import click

from blend.cli import options
from blend.cli.console import print_json, say


@click.command("env")
@options.json_option
def command(as_json: bool) -> None:
    """Describe this machine and the versions in use."""
    from blend.eval.machine import describe_machine

    facts = asdict(describe_machine())
    if as_json:
        print_json(facts)
        return
    versions = facts.pop("versions", {})
    for name, value in {**facts, **versions}.items():
        say(f"{name:24} {value if value is not None else '-'}")
