"""What a terminal and a pipe see: help, progress bars, widths, colours, encodings, closed pipes."""

import os
import re
import subprocess
import sys

import click
import pytest
from places import PYTHONPATH, REPOSITORY
from pty_terminal import TERMINAL, Terminal

from blend.cli import blend as group
from blend.cli import progress
from blend.select import SELECTORS, make_selector

COMMANDS = group.list_commands(click.Context(group))
HEAVY = ("torch", "transformers", "faiss", "triton", "sentence_transformers", "numpy")


def _python(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **options}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, check=False)


def test_the_help_of_every_command_loads_nothing_heavy():
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom blend.cli import blend\n"
        f"for name in {COMMANDS}:\n    print(CliRunner().invoke(blend, [name, '-h']).output.partition(' [')[0])\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = _python("-c", script)
    assert result.stdout.splitlines() == [*(f"Usage: blend {name}" for name in COMMANDS), "[]"], result.stderr


def test_the_installed_command_runs(filled):
    """Once without the tests' shortcut of forking: a fresh interpreter, and two results joined by a pipe."""
    env = {"KVBLEND_MODEL": str(filled.model), "KVBLEND_STORE": str(filled.store), "OMP_NUM_THREADS": "1"}
    result = _python("-m", "blend", "answer", "the quarry", "--max-new-tokens", "2", "--json", **env)
    assert result.returncode == 0, result.stderr
    assert '"hit": true' in result.stdout
    first, *once, last = result.stderr.splitlines()
    assert (first[:7], last[:7]) == ("Loading", "the ans")
    assert all("has not been checked yet" in line for line in once), "the note of a machine's first run"


def test_docs_are_up_to_date():
    result = _python(str(REPOSITORY / "scripts" / "gen_cli_docs"), "--check")
    assert result.returncode == 0, result.stderr


def test_a_lines_rate_is_of_all_that_was_done_since_the_stage_began(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    show = progress.stage_progress()
    for now[0], count in ((0.0, 0), (5.0, 100), (15.0, 309), (16.0, 400), (25.0, 619)):
        show("encode", count, 619)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "Computing caches: 309 of 619 tokens, 21 tokens/s, 15 s left",
        "Computing caches: 619 of 619 tokens, 25 tokens/s",
    ]


@pytest.mark.parametrize("columns", [30, 160])
def test_the_panel_fits_the_terminal(filled, columns):
    terminal = Terminal(columns)
    filled.done("answer", "the orchard", "--max-new-tokens", "2", out=terminal.path, env=TERMINAL)
    _, _, panel = terminal.shown.partition("╭")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", panel)
    lines = [line for line in plain.splitlines() if line.startswith("│")]
    assert lines
    assert max(map(len, lines)) <= columns
    assert "\x1b[32mhit" in panel


def test_colours_can_be_switched_off(filled):
    terminal = Terminal(80)
    filled.done(
        "answer", "x", "--max-new-tokens", "1", out=terminal.path, err=terminal.path, env={**TERMINAL, "NO_COLOR": "1"}
    )
    assert "\x1b[3" not in terminal.shown


def test_a_reader_that_goes_away(filled, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    running = filled.start("answer", "the orchard", "--max-new-tokens", "2000", "--top-k", "2", out=fifo)
    with fifo.open("rb", buffering=0) as reader:
        reader.read(8)
    result = running.wait()
    assert result.code == 141
    assert "Traceback" not in result.err
    assert "Error" not in result.err


def test_env_and_models_describe_themselves(blend):
    assert blend.here("env", "--json").json["versions"]["kvblend"] in blend.here("env").out
    listed = blend.here("models", "--json").json
    assert listed["default"] in {model["name"] for model in listed["models"]}
    assert listed["default"] in blend.here("models").out
    assert blend.here("--version").out.startswith("blend, version ")


def test_selectors_describe_themselves(blend):
    table, listed = blend.here("selectors"), blend.here("selectors", "--json").json
    assert listed["default"] == "query_guided"
    assert [entry["name"] for entry in listed["selectors"]] == list(SELECTORS)
    for entry in listed["selectors"]:
        assert f"{entry['name']:14}{entry['summary']}" in table.out
        given = ",".join(f"{key}={value}" for key, value in entry["parameters"].items())
        assert make_selector(f"{entry['name']}:{given}" if given else entry["name"]).spec == entry["name"]
        assert all(f"\n{key:14}" in table.out for key in entry["parameters"])


def test_corpus_feeds_precompute(blend):
    assert blend("corpus", "docs", "--module", "csv").out == "1 document in docs\n"
    assert blend("precompute", "docs", "--json").json["documents"] == 1
    assert blend.here("corpus", "docs", "--module", "nomod").code == 8
