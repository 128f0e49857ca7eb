"""`scripts/bench_edits leaks` on a tiny model."""

import json
import random
from functools import partial
from types import SimpleNamespace

import pytest
from commands import ROOT, main, printed

from tests.serve.tool_templates import QWEN
from tests.tiny_model import save_tiny_model


@pytest.fixture
def leaks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import _leaks

    return _leaks


def paragraphs(count):
    """Paragraphs of 30 words, no two of which are alike."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(3, 8))) for _ in range(400)]
    return [" ".join(draw.choices(words, k=30)) + "." for _ in range(count)]


def test_secrets_of_every_kind_are_asked_for_in_every_way(tmp_path, leaks, monkeypatch):
    monkeypatch.setattr(leaks, "prose", partial(paragraphs, 60))
    text = "\n\n".join(paragraphs(60))
    model = save_tiny_model(tmp_path / "tiny", text, template=QWEN, max_position_embeddings=16_384)
    file = tmp_path / "leaks.json"
    arguments = ("leaks", "--json", file, "--model", model)
    printed("bench_edits", *arguments, "--secrets", 2)
    assert main("bench_edits", *arguments, "--secrets", 5) == 0
    rows = json.loads(file.read_text())["leaks"]
    assert len(rows) == 5 * 3 * 2
    assert {row["kind"] for row in rows} == {"code", "balance", "password", "person", "instruction"}
    fast = [row for row in rows if row["way"] == "fast" and row["question"] == "direct"]
    assert any(row["moved"] > 0.3 * row["rows"] for row in fast)
    assert all(row["moved"] == 0 for row in rows if row["way"] == "full")
    shown = printed("bench_edits", *arguments, "--show")
    assert "| direct | checked | 5 |" in shown


@pytest.mark.parametrize(
    ("text", "answer", "says"),
    [
        ("It is amber.", "amber", True),
        ("AMBER", "amber", True),
        ("4821", "482", False),
        ("no amberish", "amber", False),
    ],
)
def test_an_answer_says_whole_words(leaks, text, answer, says):
    assert leaks.says(text, answer) is says


def test_the_margin_is_read_where_the_two_answers_differ(leaks):
    spelled = {"4821": [4, 8, 2, 1], "4877": [4, 8, 7, 7]}
    tokenizer = SimpleNamespace(encode=lambda text, **_: spelled[text])

    def token(number, *top):
        return SimpleNamespace(id=number, top=[SimpleNamespace(id=other, logprob=value) for other, value in top])

    reply = SimpleNamespace(tokens=[token(4), token(8), token(7, (7, -0.5), (2, -3.0))])
    probe = leaks.Probe("Which number?", "4821", "4877")
    assert leaks.margin(probe, reply, tokenizer) == -2.5
    elsewhere = SimpleNamespace(tokens=[token(4), token(9), token(7, (7, -0.5))])
    assert leaks.margin(probe, elsewhere, tokenizer) is None
