"""Output of the commands: notes on stderr, results on stdout; `blend.cli.progress` shows progress.

All text is written here or in `blend.cli`. Titles, file names, ids and answers may hold control characters, which
`blend.ranges` makes harmless.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from blend.errors import BlendError, ConfigError
from blend.text import json_text, visible
from blend_retrieval.decoding import DecodingError, decode

if TYPE_CHECKING:
    from rich.console import RenderableType


ANSWER_KEEPS = "\n\t"
STDOUT = Path("-")  # in place of a file
_LONGEST_FILE = 64 << 20  # bytes; a device never ends


class _Console(Console):
    """Raises for a closed pipe, as `blend.cli` expects."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich is handling


errors = _Console(stderr=True, highlight=False)
output = _Console(highlight=False)


def note(message: str) -> None:
    """Print one line to stderr."""
    errors.print(Text(visible(message)), soft_wrap=True)


def silence_notes() -> None:
    """Print no notes until the running command ends."""
    errors.quiet = True
    click.get_current_context().call_on_close(_resume_notes)


def _resume_notes() -> None:
    errors.quiet = False


def read_text(path: Path, failure: type[BlendError]) -> str:
    """The text of a user's file, with a note if its encoding was detected. Raises `failure`, in one line."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        if len(content) > _LONGEST_FILE:
            raise failure(f"{path} has more than {_LONGEST_FILE >> 20} MB; name a text file, or divide it")
        text, how = decode(content)
    except OSError as error:
        raise failure(f"{path} cannot be read ({error.strerror}); name a text file") from None
    except DecodingError as error:
        raise failure(f"{path} {error}") from None
    if how:
        note(f"{path} {how}")
    return text


def say(line: str = "") -> None:
    """Print one line of a result to stdout."""
    click.echo(visible(line))


def stream(piece: str) -> None:
    """Print a piece of an answer, which may hold line breaks and tabs."""
    click.echo(visible(piece, keep=ANSWER_KEEPS), nl=False)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print warnings from inside as notes."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    for warning in caught:
        note(str(warning.message))


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON object on one line, all that a command with `--json` writes to stdout."""
    speaks_unicode = getattr(sys.stdout, "encoding", None) == "utf-8"
    click.echo(json_text(document) if speaks_unicode else json.dumps(document))


def check_outputs(**files: Path | None) -> None:
    """Raise `ConfigError` for a file that cannot be written, or that two of these options name. files: by option."""
    from blend.eval.output import check_writable

    paths = [path for path in files.values() if path is not None]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"{paths[0]}: --{' and --'.join(files)} name the same file; give each its own")
    for path in paths:
        if path != STDOUT:
            check_writable(path)


def show_results(tables: RenderableType, document: Mapping[str, Any], json_path: Path | None) -> None:
    """Print tables, also to a narrower terminal or a pipe, and write JSON; with that on stdout, the tables go to stderr."""
    from blend.eval.show import WIDTH

    to_stdout = json_path == STDOUT
    _Console(highlight=False, stderr=to_stdout, width=WIDTH).print(tables)
    if to_stdout:
        print_json(document)
    elif json_path is not None:
        write_document(document, json_path)


def write_document(document: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file, and say so."""
    from blend.eval.output import write_json

    write_json(path, document)
    note(f"wrote {path}")


def seconds(value: float) -> str:
    """A time, short: 12 ms, 1.23 s, 75 s, 12.1 min, 7.1 h, 40.0 days."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if value >= 2 * length:
            return f"{value / length:,.1f} {unit}"
    return f"{value:.3g} s" if value >= 0.9995 else f"{value * 1000:.0f} ms"


def make_sure(what: str, *, sure: bool) -> None:
    """Ask before `what` is deleted, unless `sure`. Raises `ConfigError` without a terminal to ask on."""
    if sure:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"say --yes to delete {what}: there is no terminal to ask on")
    click.confirm(f"Delete {what}?", abort=True)
