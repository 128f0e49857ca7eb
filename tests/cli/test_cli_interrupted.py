"""Ctrl-C, SIGTERM and SIGKILL at any point: one line, the right exit code, nothing lost."""

import random
import signal

import pytest
from blend_process import ASK, CHUNKS, all_caches, entries, files_of, one_line


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


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments_precompute_leaves_a_corpus_that_answers(lots, undisturbed, seed):
    """Killed three times, wherever it is, also while it loads, indexes or fits. Whatever is there then is right."""
    draw = random.Random(seed)
    whole = all_caches(undisturbed.store)
    for _ in range(3):
        caches = draw.randrange(whole + 1)
        running = lots.start("precompute", "lots", *CHUNKS)
        running.until(lambda: draw.random() < 0.002 or all_caches(lots.store) >= caches)  # noqa: B023
        running.send(signal.SIGKILL).wait()
        answer = lots(*ASK)
        if answer.code:
            assert "no index" in answer.refused(8)
        else:
            assert answer.json["problems"] == []
            assert len(answer.json["chunks"]) == 8
    lots.done("precompute", "lots", *CHUNKS)
    assert files_of(lots.store) == files_of(undisturbed.store)
    answer, expected = lots(*ASK).json, undisturbed(*ASK).json
    assert (answer["answer"], answer["chunks"]) == (expected["answer"], expected["chunks"])


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
