"""`blend census`: which tokens of logged requests repeat, why prefix caches miss them, and what blending would save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import STDOUT, check_outputs, note, show_results
from blend.cli.options import NAME, OUTPUT, PLACE, number
from blend.cli.progress import counting, fetch_progress
from blend.errors import BlendError, DatasetError
from blend.weights import resolve_model

if TYPE_CHECKING:
    from blend.census.census import Census
    from blend.census.rates import Rates
    from blend.census.reading import LogReader

MEMORY_GB = 1.0
CACHE_TOKENS = 131_072


@click.command("census", cls=options.Command)
@click.argument("logs", nargs=-1, required=True, type=PLACE)
@click.option(
    "--model", type=NAME, help="Count with its tokenizer, and time its prefill here.  [default: estimate tokens]"
)
@number("rate", "Tokens that prefill computes a second, instead of timing --model.")
@number("cache_tokens", "Tokens that the exact prefix cache holds.", CACHE_TOKENS)
@number("memory", "Memory for earlier text.", MEMORY_GB, metavar="GB")
@options.json_file
@click.option("--picture", type=OUTPUT, help="Draw tokens by turn, and what reuse would compute (.png or .svg).")
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
    check_outputs(json=json_path, picture=picture)
    for log in logs:
        _check(log)
    from blend.census.census import Census
    from blend.census.picture import write_picture
    from blend.census.reading import LogReader
    from blend.census.show import Findings, document, render
    from blend.census.tokens import Tokenize, estimated, tokenizer_of
    from blend.eval.picture import check_picture

    if picture is not None:
        check_picture(picture)
    tokenize: Tokenize = estimated
    tokenizer = "estimated"
    if model is not None:
        opening.check_model(model)
        tokenize = tokenizer_of(resolve_model(model, progress=fetch_progress()))
        tokenizer = f"counted by {model}'s tokenizer"
    reader = LogReader()
    census = Census(tokenize, round(memory * 1e9), cache_tokens)
    for log in logs:
        _count(census, reader, log)
    names = _name(logs[0]) if len(logs) == 1 else f"{_name(logs[0])} and {len(logs) - 1} more"
    if not census.requests:
        reasons = [*reader.unread, *reader.named]
        raise DatasetError(f"no request in {names}: {'; '.join(reasons) or 'it is empty'}{reader.hint}")
    findings = Findings(census, reader, names, tokenizer, _rates(model, rate, values))
    show_results(render(findings), document(findings), json_path)
    if picture is not None:
        write_picture(findings, picture)
        note(f"wrote {picture}")


def _check(log: Path) -> None:
    """Raise `DatasetError` for what cannot be a log, before any is counted."""
    if log == STDOUT:
        return
    if not log.exists():
        raise DatasetError(f"{log} is not there; name a JSONL file of requests, or - for standard input")
    from blend.census.lines import unreadable

    if problem := unreadable(log):
        raise DatasetError(f"{log} {problem}")


def _count(census: Census, reader: LogReader, log: Path) -> None:
    """Count the requests of a log. The progress of a file is in its megabytes, packed or not; that of a pipe in requests."""
    megabytes = log.stat().st_size // 1_000_000 if log != STDOUT and log.is_file() else 0
    progress = counting(f"Reading {_name(log)}", "MB" if megabytes else "requests", megabytes)
    with open(0 if log == STDOUT else log, "rb") as stream, progress as count:  # noqa: PTH123 - 0 is standard input
        for requests, request in enumerate(reader.read(_name(log), stream), 1):
            census.add(request)
            count(stream.tell() // 1_000_000 if megabytes else requests)


def _name(log: Path) -> str:
    return "stdin" if log == STDOUT else log.name


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
        return measured_rates(Decoder.load(model, **values))
    except BlendError as error:
        note(f"no seconds: {error}")
        return None
