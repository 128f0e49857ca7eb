"""`blend census`: which tokens of logged requests repeat, why prefix caches miss them, and what blending would save."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import LINE_EVERY_S, errors, fetch_progress, note, output, print_json, print_wide
from blend.cli.options import NAME, OUTPUT, OUTPUT_OR_STDOUT, number
from blend.cli.report import STDOUT, check_files
from blend.errors import BlendError, DatasetError
from blend.weights import resolve_model

if TYPE_CHECKING:
    from blend.census.rates import Rates
    from blend.census.reading import LoggedRequest, LogReader
    from blend.census.show import Findings

MEMORY_GB = 1.0
CACHE_TOKENS = 131_072


@click.command("census", cls=options.Command)
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True, dir_okay=False))
@click.option(
    "--model", type=NAME, help="Count with its tokenizer, and time its prefill here.  [default: estimate tokens]"
)
@number("rate", "Tokens that prefill computes a second, instead of timing --model.")
@number("cache_tokens", "Tokens that the exact prefix cache holds.", CACHE_TOKENS)
@number("memory", "Memory for earlier text.", MEMORY_GB, metavar="GB")
@click.option(
    "--json",
    "json_path",
    type=OUTPUT_OR_STDOUT,
    help="Write all figures as JSON; - is standard output, and the tables then go to standard error.",
)
@click.option("--picture", type=OUTPUT, help="Draw the census (.png, .svg or .pdf).")
@options.computing
def command(
    logs: tuple[Path, ...],
    model: str | None,
    rate: float | None,
    cache_tokens: int,
    memory: float,
    json_path: Path | None,
    picture: Path | None,
    **values: Any,
) -> None:
    """Say which tokens of the requests in LOGS repeat, why a prefix cache misses them, and what blending would save.

    LOGS are JSONL files of requests to OpenAI's or Anthropic's API, also gzipped; - is
    standard input. Nothing is sent anywhere.
    """
    check_files(json_path, picture)
    _require_files(logs)
    from blend.census.census import Census
    from blend.census.reading import LogReader
    from blend.census.show import Findings
    from blend.census.tokens import Tokenize, estimated, tokenizer_of

    tokenize: Tokenize = estimated
    tokenizer = "estimated"
    if model is not None:
        opening.check_model(model)
        tokenize = tokenizer_of(resolve_model(model, progress=fetch_progress()))
        tokenizer = f"counted by {model}'s tokenizer"
    reader = LogReader()
    census = Census(tokenize, round(memory * 1e9), cache_tokens)
    for request in _requests(logs, reader):
        census.add(request)
    if not census.requests:
        raise DatasetError(f"no request in {_words(logs)}: {'; '.join(reader.named) or 'it is empty'}")
    rates = _rates(model, rate, values)
    _show(Findings(census, reader, _words(logs), tokenizer, rates), json_path, picture)


def _require_files(logs: tuple[Path, ...]) -> None:
    for log in logs:
        if log != STDOUT and not log.exists():
            raise DatasetError(f"{log} is not there; name a JSONL file of requests, or - for standard input")


def _requests(logs: tuple[Path, ...], reader: LogReader) -> Iterator[LoggedRequest]:
    """The requests of all logs, with a note on the progress every so often."""
    begun = shown = time.monotonic()
    requests = 0
    for log in logs:
        with _opened(log) as stream:
            for request in reader.read(log.name if log != STDOUT else "stdin", stream):
                yield request
                requests += 1
                now = time.monotonic()
                if now - shown >= LINE_EVERY_S:
                    shown = now
                    megabytes = reader.nbytes / 1e6
                    note(
                        f"read {megabytes:,.0f} MB, {requests:,} requests, {megabytes / (now - begun) * 60:,.0f} MB a minute"
                    )


def _opened(log: Path) -> BufferedReader:
    if log == STDOUT:
        return BufferedReader(sys.stdin.buffer)  # type: ignore[arg-type]
    try:
        return log.open("rb")
    except OSError as error:
        raise DatasetError(f"{log} cannot be read ({error.strerror}); name a JSONL file of requests") from None


def _words(logs: tuple[Path, ...]) -> str:
    names = ["stdin" if log == STDOUT else log.name for log in logs]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _rates(model: str | None, rate: float | None, values: dict[str, Any]) -> Rates | None:
    """How fast prefill is: as --rate says, else as the model is timed; None if neither is there."""
    from blend.census.rates import given_rate, measured_rates

    if rate is not None:
        return given_rate(rate)
    if model is None:
        return None
    note(f"Timing prefill of {model} ...")
    from blend.model.decoder import Decoder

    try:
        decoder = Decoder.load(model, **values)
    except BlendError as error:
        note(f"no seconds: {error}")
        return None
    return measured_rates(decoder)


def _show(findings: Findings, json_path: Path | None, picture: Path | None) -> None:
    """Print the tables and write the files. With JSON on standard output, the tables go to standard error."""
    from blend.census.show import WIDTH, document, render, write_picture
    from blend.eval.output import write_whole

    to_stdout = json_path == STDOUT
    print_wide(errors if to_stdout else output, render(findings), WIDTH)
    if json_path and not to_stdout:
        write_whole(json_path, json.dumps(document(findings), indent=1).encode())
        note(f"wrote {json_path}")
    if picture:
        write_picture(findings, picture)
        note(f"wrote {picture}")
    if to_stdout:
        print_json(document(findings))
