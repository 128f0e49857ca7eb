"""Where a report goes: table, JSON, picture. What cannot be written is found before anything is measured."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from blend.errors import ConfigError

if TYPE_CHECKING:
    from blend.eval.report import Report

STDOUT = Path("-")


def check_outputs(json_path: Path | None, picture: Path | None) -> None:
    """Raise `ConfigError` for files that could not be written in the end, and for packages that a report lacks."""
    from blend.eval.report import check_writable
    from blend.eval.show import SUFFIXES

    if find_spec("rouge_score") is None:
        raise ConfigError("a report needs rouge-score: pip install 'kvblend[report]'")
    if picture and picture.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{picture}: a picture ends in one of {', '.join(SUFFIXES)}")
    if picture and find_spec("matplotlib") is None:
        raise ConfigError("the picture needs matplotlib: pip install 'kvblend[report]'")
    if picture and picture == json_path:
        raise ConfigError(f"{picture}: --json and --picture name the same file; give each its own")
    for path in (json_path, picture):
        if path and path != STDOUT:
            check_writable(path)


def show_report(report: Report, json_path: Path | None, picture: Path | None) -> None:
    """Print the table and write the files. With JSON on standard output, the table goes to standard error."""
    from blend.cli.console import errors, note, output, print_json, print_wide
    from blend.eval.report import report_document, write_json
    from blend.eval.show import WIDTH, render_report, write_picture

    to_stdout = json_path == STDOUT
    print_wide(errors if to_stdout else output, render_report(report), WIDTH)
    if json_path and not to_stdout:
        write_json(report, json_path)
        note(f"wrote {json_path}")
    if picture:
        write_picture(report, picture)
        note(f"wrote {picture}")
    if to_stdout:
        print_json(json.loads(json.dumps(report_document(report), default=str)))
