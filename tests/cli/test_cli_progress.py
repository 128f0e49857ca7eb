"""Bars on a terminal: what they show at every width, what they leave, and that nothing tears them."""

import io
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest
from pty_terminal import TERMINAL, Terminal, screens

from blend.cli import console, progress
from blend.cli.console import note
from blend.cli.progress import counting, fetch_progress, reading, stage_progress

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
RED = "\x1b[31m"


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set; a bar shows at once when it is late enough."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def on_terminal(monkeypatch) -> Callable[..., Terminal]:
    """Gives the commands' notes to a terminal of so many columns."""

    def on_terminal(columns: int = 80, **env: str) -> Terminal:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**TERMINAL, "COLUMNS": str(columns), **env}.items():
            monkeypatch.setenv(name, value)
        terminal = Terminal(columns)
        monkeypatch.setattr(sys, "stderr", terminal.path.open("w", encoding="utf-8"))
        errors = type(console.errors)(stderr=True, highlight=False)
        monkeypatch.setattr(console, "errors", errors)
        monkeypatch.setattr(progress, "errors", errors)
        return terminal

    return on_terminal


def shown_by(terminal: Terminal) -> str:
    sys.stderr.close()
    return terminal.shown


def half_way(clock: list[float], words: str = "Computing caches", between: Callable[[], object] = lambda: None) -> None:
    """A stage of ten seconds that is half done after five."""
    with counting(words, "tokens", 6190) as count:
        clock[0] += 5
        count(3095)
        note("halfway")  # draws
        between()
        note("further")


@pytest.mark.parametrize(
    ("columns", "bar"),
    [
        (120, f"Computing caches {'━' * 30}  50%, 619 tokens/s, 5 s left"),
        (80, f"Computing caches {'━' * 30}  50%, 619 tokens/s, 5 s left"),
        (60, f"Computing caches {'━' * 12}  50%, 619 tokens/s, 5 s left"),
        (46, f"Computing caches {'━' * 12}  50%, 5 s left"),
        (40, f"Computing caches {'━' * 6}  50%, 5 s left"),
        (30, "Computing caches  50%, 5 s l…"),
    ],
)
def test_a_bar_fits_the_terminal(clock, on_terminal, columns, bar):
    terminal = on_terminal(columns)
    half_way(clock)
    after = screens(shown_by(terminal), columns)
    assert max(len(line) for lines in after for line in lines) <= columns
    drawn = {line.replace("╸", "━").replace("╺", "━") for lines in after for line in lines if "50%" in line}
    if columns > 30:
        assert drawn == {bar}
    else:
        (line,) = drawn
        assert line.startswith("Comp")
        assert "50%, 5 s left" in line
    assert after[-1] == ["halfway", "further"]


def test_short_stages_draw_nothing(clock, on_terminal):
    terminal = on_terminal()
    show = stage_progress()
    for stage in ("chunk", "embed"):
        for done in range(5):
            clock[0] += 0.2
            show(stage, done, 4)
    shown = shown_by(terminal)
    assert re.sub(r"\x1b\[\?25[lh]|\r", "", shown) == ""
    assert shown.count(HIDE) == shown.count(SHOW) > 0


def test_a_stage_that_had_a_bar_leaves_a_line(clock, on_terminal):
    terminal = on_terminal()
    show = stage_progress(", shard 1/2")
    for stage, total in (("embed", 40), ("calibrate", 8000), ("encode", 10)):
        for done in range(5):
            clock[0] += 0.1 if stage == "encode" else 1
            show(stage, done * total // 4, total)
    fetching = fetch_progress()
    fetching("download", 0, 478_000_000)
    clock[0] += 3
    fetching("download", 240_400_000, 478_000_000)
    note("half of it")  # draws
    clock[0] += 3
    fetching("download", 478_000_000, 478_000_000)
    fetching("convert", 0, 1)
    clock[0] += 75
    fetching("convert", 1, 1)
    shown = shown_by(terminal)
    drawn = {line.replace("╸", "━").replace("╺", "━") for lines in screens(shown, 80) for line in lines}
    assert f"Downloading weights {'━' * 30}  50%, 80 MB/s, 3 s left" in drawn
    assert screens(shown, 80)[-1] == [
        "Embedding chunks, shard 1/2: 40 of 40 chunks, 10 chunks/s",
        "Measuring the KV correction, shard 1/2: 8,000 of 8,000 tokens, 2,000 tokens/s",
        "Computing caches, shard 1/2: 10 of 10 tokens, 25 tokens/s",
        "half of it",
        "Downloading weights: 478 of 478 MB, 80 MB/s",
        "Converting to safetensors, once: 75 s",
    ]
    assert shown.count(HIDE) == shown.count(SHOW)


def test_a_pipe_gets_a_line_every_ten_seconds(clock, capsys):
    with counting("Comparing answers", "questions", 60) as count:
        for place in range(1, 31):
            clock[0] += 1
            count(place)
    fetching = fetch_progress()
    for part in range(25):  # two looks a second
        fetching("download", part * 40_000_000, 1_000_000_000)
        clock[0] += 0.5
    fetching("download", 1_000_000_000, 1_000_000_000)
    fetching("load", 0, 0)
    for done in range(1, 25):
        clock[0] += 1
        fetching("load", done, 24)
    assert capsys.readouterr().err.splitlines() == [
        "Comparing answers: 10 of 60 questions, 1 questions/s, 50 s left",
        "Comparing answers: 20 of 60 questions, 1 questions/s, 40 s left",
        "Comparing answers: 30 of 60 questions, 1 questions/s, 30 s left",
        "Downloading weights, 1,000 MB ...",
        "Downloading weights: 800 of 1,000 MB, 80 MB/s, 2 s left",
        "Loading weights: 10 of 24 tensors, 1 tensors/s, 14 s left",
        "Loading weights: 20 of 24 tensors, 1 tensors/s, 4 s left",
    ]


def test_a_run_that_goes_on_counts_its_own_rate(clock, capsys):
    show = stage_progress()
    show("encode", 900, 1000)
    clock[0] += 10
    show("encode", 950, 1000)
    assert capsys.readouterr().err == "Computing caches: 950 of 1,000 tokens, 5 tokens/s, 10 s left\n"


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": "dumb", "FORCE_COLOR": "1"}, {"TTY_INTERACTIVE": "0"}])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(clock, on_terminal, env):
    terminal = on_terminal(**env)
    with counting("Computing caches", "tokens", 100) as count:
        clock[0] += 11
        count(50)
    assert shown_by(terminal) == "Computing caches: 50 of 100 tokens, 5 tokens/s, 11 s left\r\n"


def test_forced_colours_draw_no_bars_in_a_file(clock, on_terminal, tmp_path, monkeypatch):
    shown_by(on_terminal(FORCE_COLOR="1"))
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        half_way(clock)
    assert (tmp_path / "log").read_text() == "halfway\nfurther\n"


def test_no_color_draws_a_bar_without_colours(clock, on_terminal):
    terminal = on_terminal(NO_COLOR="1")
    half_way(clock)
    shown = shown_by(terminal)
    assert "━━━" in shown
    assert set(re.findall(r"\x1b\[[0-9;]*m", shown)) <= {"\x1b[0m"}


def test_names_are_text(clock, on_terminal):
    """Neither rich's markup nor control codes."""
    terminal = on_terminal(120)
    half_way(clock, f"Reading [red]{RED}a[/red].jsonl")
    shown = shown_by(terminal)
    assert RED not in shown
    assert "Reading [red]\\x1b[31ma[/red].jsonl" in shown


def test_what_libraries_print_meanwhile_stand_above_the_bar(clock, on_terminal):
    terminal = on_terminal()

    def between() -> None:
        sys.stderr.write("a line of a library\n")
        sys.stderr.flush()

    half_way(clock, between=between)
    after = screens(shown_by(terminal), 80)
    assert after[-1] == ["halfway", "a line of a library", "further"]
    for lines in after:
        assert sum("%" in line for line in lines) <= 1, "one bar at a time"


def test_a_bar_stays_while_a_library_is_silenced(clock, on_terminal):
    """The conversion of weights catches what is written to stderr."""
    terminal = on_terminal()
    stderr = sys.stderr
    caught = io.StringIO()
    fetching = fetch_progress()
    fetching("convert", 0, 1)
    with redirect_stderr(caught):
        clock[0] += 5
        note("a note")  # draws
    fetching("convert", 1, 1)
    assert sys.stderr is stderr
    assert caught.getvalue() == ""
    after = screens(shown_by(terminal), 80)
    assert any(lines[-1].startswith("Converting to safetensors, once ━") for lines in after)
    assert after[-1] == ["a note", "Converting to safetensors, once: 5 s"]


def test_an_error_ends_the_bar_and_gives_the_cursor_back(clock, on_terminal):
    terminal = on_terminal()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            half_way(clock, between=lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not isinstance(sys.stderr, type(console.errors))
    note("interrupted")
    shown = shown_by(terminal)
    assert shown.count(HIDE) == shown.count(SHOW) > 0
    assert shown.rindex(HIDE) < shown.rindex(SHOW) < shown.index("interrupted")
    assert screens(shown, 80)[-1] == ["halfway", "interrupted"]


def test_ctrl_c_in_a_command_leaves_a_sane_terminal(blend, tmp_path):
    """A bar of unknown length, of a pipe that never ends."""
    os.mkfifo(tmp_path / "log")
    terminal = Terminal(80)
    running = blend.start("census", tmp_path / "log", err=terminal.path, env=TERMINAL)
    with (tmp_path / "log").open("w") as log:
        log.write('{"prompt": "Hello there"}\n')
        log.flush()
        running.until(lambda: "Reading log" in terminal.so_far)
        result = running.send(signal.SIGINT).wait()
    shown = terminal.shown
    assert result.code == 130
    assert "1 requests" in shown
    assert shown.count(HIDE) == shown.count(SHOW)
    assert screens(shown, 80)[-1] == ["blend: interrupted"]


def test_a_quick_command_draws_no_bar(blend, documents):
    terminal = Terminal(100)
    blend.done("precompute", documents / "quarry.md", "--chunk-tokens", "64", err=terminal.path, env=TERMINAL)
    shown = terminal.shown
    assert shown.count(HIDE) == shown.count(SHOW)
    *_, last = screens(shown, 100)
    assert [line.partition(" ")[0] for line in last if line] == ["Loading", "Computing"]
    assert not any("━" in line for lines in screens(shown, 100) for line in lines)


def test_a_long_file_is_named_while_it_is_read(clock, on_terminal):
    terminal = on_terminal()
    with reading() as show:
        show("sheet.xlsx", 100, 1000, "bytes")
        clock[0] += 5
        show("sheet.xlsx", 400, 1000, "bytes")
        note("halfway")  # draws
        show("sheet.xlsx", 0, 0, "")
        note("behind it")
    shown = shown_by(terminal)
    before, _, after = shown.partition("behind it")
    assert "Reading sheet.xlsx" in before
    assert " 40%" in before
    assert "Reading" not in after


def test_long_files_leave_no_lines_in_logs(capsys):
    with reading() as show:
        show("sheet.xlsx", 100, 1000, "bytes")
        show("sheet.xlsx", 1000, 1000, "bytes")
    assert capsys.readouterr().err == ""
