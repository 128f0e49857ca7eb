"""The command line: one file a command, loaded when it is called; how a command ends is in `ending`."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from blend.cli.ending import PipeClosedError, exit_code_of
from blend.version import __version__

_COMMANDS = {
    "analyze": "Show attention, KV deviation and what blending restores, as a page.",
    "answer": "Answer a question over the precomputed documents.",
    "corpus": "Write the demo corpus: Python's own documentation.",
    "drop": "Delete a corpus.",
    "env": "Describe this machine and the versions in use, for bug reports.",
    "models": "List the models whose weights need no hub.",
    "plan": "Say what a corpus of caches costs, before any is computed.",
    "precompute": "Chunk, index and cache documents.",
    "report": "Measure speed and quality against full recompute.",
    "selectors": "List the selectors and their parameters.",
    "serve": "Answer many at once over HTTP, in OpenAI's protocol.",
    "store": "Show what a store holds, verify, prune and pin its caches.",
    "vllm": "Blend prompts for vLLM, which decodes them.",
}


class LazyGroup(click.Group):
    """Knows its commands by name and help line; imports one when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands in alphabetical order."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"blend.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest commands named for one that does not exist."""
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], _COMMANDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; choose one of {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"no such command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help lines above, so that `--help` imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click would print a line of its own about Ctrl-C and swallow a closed pipe."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None
        except BrokenPipeError:
            raise PipeClosedError from None


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="blend")
@click.pass_context
def blend(ctx: click.Context) -> None:
    """KV-cache reuse and RAG prefill for HuggingFace decoders.

    Compute the KV cache of every chunk of your documents once, and answer questions from blended caches in a fraction of
    the time that full prefill takes.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Run the command line; a mistake ends in one line on stderr and the exit code of its kind."""
    _quiet_libraries()
    sys.exit(exit_code_of(lambda: blend(prog_name="blend", standalone_mode=False)))


def _quiet_libraries() -> None:
    """Keep the libraries' chatter off the terminal unless somebody asked for it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
