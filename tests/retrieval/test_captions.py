"""Subtitles and transcripts."""

from blend_retrieval.loading import load_bytes

VTT = """WEBVTT - Harbour talk

STYLE
::cue { color: red }

NOTE a secret

intro
00:01.000 --> 00:03.500 align:start
<v.loud Anna>The fee is</v>
<b>31</b> crowns &amp; more.

00:00:04.000 --> 00:00:06.000
<v Anna>In winter 12.

00:00:07.000 --> 00:00:09.000
<v Orm>No.
<v Anna>Yes.

01:00:07.000 --> 01:00:09.000
<v Anna>Later.
"""
SRT = """1
00:00:01,000 --> 00:00:03,000
{\\an8}<i>The fee is</i>
31 crowns.

2
00:00:03,500 --> 00:00:05,000
- Really?
- 12
3
00:02:03,500 --> 00:02:05,000
2024
"""
ROLLING = """WEBVTT

00:00:01.000 --> 00:00:02.000
the<00:00:01.500><c> fee</c>

00:00:02.000 --> 00:00:03.000
the fee
is<00:00:02.500><c> 31</c>

00:00:03.000 --> 00:00:04.000
is 31
crowns
"""


def read(name, text):
    (document,), skipped = load_bytes(name, text.encode())
    return document.title, document.text.split("\n\n"), [entry.reason for entry in skipped]


def test_captions_with_speakers():
    paragraphs = [
        "[00:00:01] Anna: The fee is 31 crowns & more. In winter 12.",
        "[00:00:07] Orm: No.",
        "[00:00:07] Anna: Yes.",
        "[01:00:07] Anna: Later.",
    ]
    assert read("talk.vtt", VTT) == ("Harbour talk", paragraphs, ["its comments (NOTE) are not read"])


def test_numbered_subtitles():
    title, paragraphs, reasons = read("film.srt", SRT)
    assert paragraphs == ["[00:00:01] The fee is\n31 crowns.\n- Really?\n- 12", "[00:02:03] 2024"]
    assert (title, reasons) == ("film", [])
    assert read("film.srt", "﻿" + SRT.replace("\n", "\r\n"))[1] == paragraphs


def test_captions_that_roll_up_are_read_once():
    assert read("a.vtt", ROLLING)[1] == ["[00:00:01] the fee is 31 crowns"]


def test_a_file_without_cues():
    _, (skipped,) = load_bytes("a.srt", b"No times here.")
    assert skipped.reason == "holds no cues with times"
