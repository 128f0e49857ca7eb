"""The command line: one file per command, imported when it runs; commands that only list something share one.

Every mistake, interruption, signal and closed pipe ends in one line on stderr and an exit code: those of `blend.errors` and
`blend_retrieval.errors`, 2 for a command line that cannot be parsed, 130 after Ctrl-C, 141 when the reader of a pipe went away,
143 after SIGTERM, 1 for a bug.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from types import FrameType

import click

from blend.errors import is_out_of_memory
from blend.text import visible
from blend.version import __version__

INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143


class Terminated(BaseException):
    """SIGTERM: unwind as after Ctrl-C, so that temporary files are cleaned up."""


def exit_code_of(run: Callable[[], object]) -> int:
    """Run a command, report an error in one line, and return the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # characters that the terminal's encoding lacks
    try:
        run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt) as stop:
        return _say(str(stop) or "interrupted", INTERRUPTED)
    except Terminated:
        return _say("terminated", TERMINATED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's last flush would fail
        return PIPE_CLOSED
    except click.ClickException as error:
        return _say(_with_remedy(error), error.exit_code)
    except Exception as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    if isinstance(code := getattr(error, "exit_code", None), int):
        return _say(str(error), code)
    if isinstance(error, OSError) and error.strerror:
        return _say(f"{error.strerror}: {error.filename or 'no file named'}", 1)
    if is_out_of_memory(error):
        return _say("out of memory; use a smaller model, --dtype bfloat16, or fewer and smaller chunks", 1)
    click.echo(visible("".join(traceback.format_exception(error)), keep="\n"), err=True, nl=False)
    return _say("this is a bug in kvblend; please report it with the lines above and the output of `blend env`", 1)


def _say(message: str, code: int) -> int:
    with suppress(OSError):
        click.echo(f"blend: {visible(' '.join(message.split()))}", err=True)
    return code


def _with_remedy(error: click.ClickException) -> str:
    """The message of a usage error in one line, with the help to read."""
    message = error.format_message().strip()
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    return f"{message.rstrip('.')}; see `{error.ctx.command_path} --help`"


_COMMANDS = {
    "analyze": "Show attention, KV deviation and what blending restores, as a page.",
    "answer": "Answer a question over the precomputed documents.",
    "census": "Count what repeats in logged requests, and what reuse would save.",
    "corpus": "Write the demo corpus: Python's own documentation.",
    "drop": "Delete a corpus.",
    "env": "Describe this machine and the versions in use, for bug reports.",
    "models": "List the models whose weights need no hub.",
    "precompute": "Chunk, index and cache documents.",
    "report": "Measure speed and quality against full recompute.",
    "selectors": "List the selectors and their parameters.",
    "serve": "Answer many at once over HTTP, in OpenAI's protocol.",
    "store": "Show what a store holds, verify, prune and pin its caches.",
    "verify": "Check that a model may be blended, and at what ratio.",
}
_LISTS = ("env", "models", "selectors")


class LazyGroup(click.Group):
    """Knows its commands by name and help line; imports one when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands in alphabetical order."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in _COMMANDS:
            near = get_close_matches(cmd_name, _COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"no such command {cmd_name!r}; {hint}", ctx)
        module, attribute = ("lists", cmd_name) if cmd_name in _LISTS else (cmd_name, "command")
        command: click.Command = getattr(import_module(f"blend.cli.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help lines above, so that `--help` imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


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


def run(arguments: list[str]) -> None:
    """Run a command line. Click's own `main` would print a line about Ctrl-C and swallow a closed pipe."""
    with blend.make_context("blend", arguments) as context:
        blend.invoke(context)


def main() -> None:
    """Run the command line; a mistake ends in one line on stderr and the exit code of its kind."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(exit_code_of(lambda: run(sys.argv[1:])))


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
