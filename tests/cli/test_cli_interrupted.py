"""Ctrl-C, SIGTERM and SIGKILL at any point: one line, the right exit code, nothing lost."""

import signal

import pytest
from blend_process import CHUNKS, Blend, Result, all_caches, entries, one_line


def _stopped(blend: Blend, number: signal.Signals) -> tuple[Result, int]:
    """A precompute that got a signal after its first caches, and how many there were then."""
    running = blend.start("precompute", "lots", *CHUNKS)
    running.until(lambda: len(entries(blend.store)) >= 20).send(number)
    result = running.wait()
    return result, all_caches(blend.store)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_precompute_stops_and_resumes_with_the_rest(lots, number, code):
    result, stored = _stopped(lots, number)
    assert result.code == code
    assert result.out == ""
    if number == signal.SIGINT:
        assert "run the same command again" in one_line(result.err)
    again = lots("precompute", "lots", *CHUNKS, "--json").json
    assert again["reused"] == stored
    assert again["computed"] == all_caches(lots.store) - stored > 0
    assert again["added"] == 0
    assert not list((lots.store / "kv" / "tmp").iterdir())


def test_answer_interrupted_while_it_decodes(filled):
    running = filled.start("answer", "the market", "--max-new-tokens", "3000", "--top-k", "2")
    result = running.until(lambda: len(running.out) > 20).send(signal.SIGINT).wait()
    assert result.code == 130
    assert one_line(result.err) == "blend: interrupted"


def test_an_interrupted_report_shows_what_was_measured(filled, tmp_path):
    out = tmp_path / "report.json"
    running = filled.start("report", "--limit", "60", "--max-new-tokens", "2", "--json", out)
    result = running.until(lambda: "[2/60]" in running.err).send(signal.SIGINT).wait()
    assert result.code == 130
    assert "of 60 questions" in one_line(result.err)
    assert "answers changed: " in result.out
    assert out.is_file()
