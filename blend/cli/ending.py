"""How a command ends: one line on stderr and an exit code for every mistake, interruption, signal and closed pipe.

Exit codes: 0, those of `blend.errors` and `blend_retrieval.errors`, 2 for a command line that cannot be understood, 130 after
Ctrl-C, 141 when the reader of a pipe went away, 143 after SIGTERM, 1 for a bug.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click

from blend.errors import is_out_of_memory
from blend.visible import visible

INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143


class Terminated(BaseException):
    """SIGTERM came: unwind as after Ctrl-C, so that progress bars and drafts are cleaned up."""


class PipeClosedError(Exception):
    """The reader of our output is gone; unlike `BrokenPipeError`, click leaves it alone."""


def exit_code_of(run: Callable[[], object]) -> int:
    """Run a command and say in one line what ended it, if anything did; its exit code."""
    _open_closed_streams()
    _tolerate_narrow_encodings()
    try:
        with _sigterm_unwinds():
            run()
            sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt) as stop:
        return _interrupted(str(stop))
    except Terminated:
        return _say("terminated", TERMINATED)
    except (PipeClosedError, BrokenPipeError):
        _silence_stdout()
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
    with suppress(OSError):
        click.echo(visible("".join(traceback.format_exception(error)), keep="\n"), err=True, nl=False)
    return _say("this is a bug in kvblend; please report it with the lines above and the output of `blend env`", 1)


def _say(message: str, code: int) -> int:
    with suppress(OSError):
        click.echo(f"blend: {visible(' '.join(message.split()))}", err=True)
    return code


def _interrupted(message: str) -> int:
    if sys.stderr.isatty():
        click.echo(err=True)  # behind the ^C that the terminal shows
    return _say(message or "interrupted", INTERRUPTED)


def _with_remedy(error: click.ClickException) -> str:
    """The message of a usage error in one line, with where to look for help."""
    message = error.format_message().strip()
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    return f"{message.rstrip('.')}; see `{error.ctx.command_path} --help`"


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _open_closed_streams() -> None:
    """A command that was started without standard output or standard error does its work and shows nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends


def _tolerate_narrow_encodings() -> None:
    """Show what a terminal's encoding lacks as question marks instead of failing in the middle of an answer."""
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="replace")


def _silence_stdout() -> None:
    """Python flushes stdout once more when it exits; nobody is there to read it."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
