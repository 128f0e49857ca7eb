"""Ctrl-C, SIGTERM and SIGKILL at any point: one line, the right exit code, nothing lost."""

import signal

import pytest
from blend_process import CHUNKS, all_caches, entries, one_line


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_precompute_stops_and_resumes_with_the_rest(lots, number, code):
    running = lots.start("precompute", "lots", *CHUNKS)
    result = running.until(lambda: len(entries(lots.store)) >= 20).send(number).wait()
    stored = all_caches(lots.store)
    assert (result.code, result.out) == (code, "")
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
