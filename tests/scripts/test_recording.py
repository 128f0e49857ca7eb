"""Recordings of a terminal: captured through a pseudo-terminal, read by a small terminal, drawn as an SVG that moves."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from commands import ROOT, main

from blend.errors import ConfigError
from recording.cast import ASKED, FIRST_TOKEN, Cast, Event, Terminal, read_cast
from recording.picture import draw_both
from recording.screen import Piece, pieces

RESULTS = ROOT / "docs" / "results"
CHAT = "line = input('> ')\nprint('answer to', line)\ninput('> ')\n"


HEAD = '{"version": 2, "width": 2, "height": 2}\n'


def _cast(seconds: float, answer: str = "seven gates") -> Cast:
    events = [
        Event(0.2, "o", "> "),
        Event(0.5, "i", "h"),
        Event(0.5, "o", "how many?"),
        Event(1.0, "m", ASKED),
        Event(1.0, "o", "\r\n"),
        Event(1.0 + seconds, "o", answer[:5]),
        Event(1.0 + seconds, "m", FIRST_TOKEN),
        Event(1.5 + seconds, "o", answer[5:]),
        Event(1.6 + seconds, "o", "\r\n\x1b[2m[<done> & out]\x1b[0m\r\n> "),
    ]
    return Cast(20, 6, {"kvblend": {"model": "tiny", "dtype": "float32"}}, events)


def test_a_program_is_recorded_with_its_times_and_read_back(tmp_path):
    with Terminal([sys.executable, "-c", CHAT], {"PATH": "/usr/bin"}, tmp_path, 20, 6) as terminal:
        terminal.until("> ", 20)
        terminal.press("né")
        terminal.enter()
        terminal.mark(ASKED)
        terminal.until_answer(20)
        terminal.until("\n> ", 20)
        terminal.enter()
        with pytest.raises(ConfigError, match="has ended before it was done"):
            terminal.until("more", 20)
    cast = terminal.cast
    typed = "".join(event.text for event in cast.events if event.kind == "i")
    assert typed == "né\r\r"
    assert [event.seconds for event in cast.events] == sorted(event.seconds for event in cast.events)
    shown = [(piece.line, piece.text.rstrip()) for piece in pieces(cast)]
    assert (1, "answer to né") in shown
    assert 0 < cast.first_token_s < 20
    cast.write(tmp_path / "a.cast")
    again = read_cast(tmp_path / "a.cast")
    assert [(event.kind, event.text) for event in again.events] == [(event.kind, event.text) for event in cast.events]
    assert again.first_token_s == pytest.approx(cast.first_token_s, abs=0.002)
    head = json.loads((tmp_path / "a.cast").read_text().splitlines()[0])
    assert (head["version"], head["width"], head["height"]) == (2, 20, 6)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (["abcdef"], [Piece(0, 0, "abcd", "", 0, None), Piece(1, 0, "ef", "", 0, None)]),
        (["ab", "\rx"], [Piece(0, 0, "a", "", 0, 1), Piece(0, 0, "x", "", 1, None), Piece(0, 1, "b", "", 0, None)]),
        (["abc\b\b", "\x1b[K"], [Piece(0, 0, "a", "", 0, None), Piece(0, 1, "bc", "", 0, 1)]),
        (["\x1b[?2004ha\x1b[1mb\x1b[0m\x1b]0;title\x07"], [Piece(0, 0, "a", "", 0, None), Piece(0, 1, "b", "bold", 0, None)]),
        (
            ["a\r\nb", "\r\nc"],
            [
                Piece(0, 0, "a", "", 0, 1), Piece(0, 0, "b", "", 1, None),
                Piece(1, 0, "b", "", 0, 1), Piece(1, 0, "c", "", 1, None),
            ],
        ),
        (["a\r\n\r\n", "\x1b[1mb"], [Piece(1, 0, "b", "bold", 1, None)]),
    ],
)  # fmt: skip
def test_the_screen_wraps_overwrites_erases_and_scrolls(output, expected):
    events = [Event(float(second), "o", text) for second, text in enumerate(output)]
    shown = pieces(Cast(4, 2, {}, events))
    assert sorted(shown, key=repr) == sorted(expected, key=repr)


def test_the_picture_has_both_answers_at_their_times_and_moves_by_css_alone():
    drawn = draw_both(_cast(6.0), _cast(1.5))
    root = ET.fromstring(drawn)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"6.0 s", "1.5 s", "4.0 times sooner", "how many?"} <= {str(text).removeprefix("> ") for text in texts}
    assert texts.count("gates") == texts.count("[<done> & out]") == 2
    loop = 1.0 + 6.0 + 0.6 + 5.0
    for seconds in (6.0, 1.5):  # the first word of the answer appears with the first token
        assert f"{{0%{{opacity:0}}{100 * (1 + seconds) / loop:.2f}%{{opacity:1}}}}" in drawn
    assert "prefers-color-scheme:dark" in drawn
    assert "prefers-reduced-motion:reduce" in drawn
    assert not re.search(r"<script|href|url\(|@import|\bon\w+=", drawn)
    still = re.sub(r"<style>.*?</style>", "", drawn, flags=re.DOTALL)
    assert 'opacity="0"' not in still, "what stays is to be seen where nothing moves"


def test_the_same_casts_give_the_same_picture_and_the_documentation_has_it(tmp_path):
    assert main("draw", "recording", RESULTS, "--out", tmp_path / "a.svg") == 0
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (ROOT / "docs" / "recording.svg").read_bytes(), "draw it anew: scripts/draw recording docs/results"
    assert len(drawn) < 200_000
    full, blend = (read_cast(RESULTS / name) for name in ("full.cast", "blend.cast"))
    for cast in (full, blend):  # what the client measured is what the terminal showed
        said = "".join(event.text for event in cast.events if event.kind == "o").replace("\r\n", "")
        assert float(re.findall(r"first token after ([\d.]+) s", said)[0]) == pytest.approx(cast.first_token_s, abs=0.2)
    assert full.first_token_s > 3 * blend.first_token_s
    (rows,) = re.findall(r" of ([\d,]+) rows computed", said)
    for page in ("README.md", "docs/index.md"):  # what they say of the recording
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"after {full.first_token_s:.1f} s, with kvblend after {blend.first_token_s:.1f} s" in text
        assert f"a prompt of {rows} tokens" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no asciinema cast"),
        ('{"version": 3, "width": 2, "height": 2}\n', "no asciinema cast"),
        (HEAD + '[0.1, "o"]\n', "no asciinema cast"),
        (HEAD + '[0.1, "o", "a"]\n', "no marker 'asked'"),
        (HEAD + '[0.1, "o", "\\u001b[2J"]\n[1, "m", "asked"]\n[2, "m", "first token"]\n', "cannot show"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, text, said):
    for name in ("full.cast", "blend.cast"):
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        main("draw", "recording", tmp_path, "--out", tmp_path / "a.svg")
    with pytest.raises(ConfigError, match="svg"):
        main("draw", "recording", RESULTS, "--out", tmp_path / "a.png")
