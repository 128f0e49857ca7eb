"""The command line: one file a command, loaded when it is called; errors are one line, exit codes are in `blend.errors`."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from blend import __version__

_COMMANDS = {
    "answer": "Answer a question over the precomputed documents.",
    "corpus": "Write the demo corpus: Python's own documentation.",
    "env": "Describe this machine and the versions in use, for bug reports.",
    "models": "List the models whose weights need no hub.",
    "precompute": "Chunk, index and cache documents.",
    "report": "Measure speed and quality against full recompute.",
    "store": "Show what a store holds.",
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help lines above, so that `--help` imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "KVBLEND"})
@click.version_option(__version__, prog_name="blend")
def blend() -> None:
    """KV-cache reuse and RAG prefill for HuggingFace decoders.

    Compute the KV cache of every chunk of your documents once, and answer questions from blended caches in a fraction of
    the time that full prefill takes.
    """


def main() -> None:
    """Run the command line; a mistake ends in one line on stderr and the exit code of its kind."""
    _quiet_libraries()
    try:
        blend(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted; what was computed is stored, run the same command again to go on", 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        _fail(str(error), error.exit_code)


def _fail(message: str, code: int) -> None:
    click.echo(f"blend: {message}", err=True)
    sys.exit(code)


def _quiet_libraries() -> None:
    """Keep the libraries' chatter off the terminal unless somebody asked for it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
