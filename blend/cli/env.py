"""`blend env`: what a bug report needs."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Describe this machine and the versions in use."""
    from blend.eval.machine import describe_machine

    facts = asdict(describe_machine())
    if as_json:
        click.echo(json.dumps(facts))
        return
    versions = facts.pop("versions", {})
    for name, value in {**facts, **versions}.items():
        click.echo(f"{name:24} {value if value is not None else '-'}")
