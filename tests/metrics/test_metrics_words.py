import sys

import pytest

from blend.eval.metrics import exact_match, has_rouge, names_one, rouge_l, wants_rouge, word_f1

SUPER_BOWL_VENUE = [
    "Santa Clara, California",
    "Levi's Stadium",
    "Levi's Stadium in the San Francisco Bay Area at Santa Clara, California.",
]


@pytest.mark.parametrize(
    ("prediction", "answers", "f1"),
    [
        # From the metric card of the SQuAD evaluation at HuggingFace.
        ("1999", ["1976"], 0),
        ("Beyonce", ["Beyoncé and Bruno Mars"], 0),
        ("climate change", ["climate change"], 1),
        # By hand on the SQuAD development set: 2 of 3 words right against 2 gold words.
        ("Levi's Stadium, Seattle", SUPER_BOWL_VENUE, 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("the Levi's stadium", SUPER_BOWL_VENUE, 1),
        # Articles, punctuation, case and the form of accents do not count.
        ("The  quick, brown\tfox!", ["quick brown fox"], 1),
        ("theatre", ["tre"], 0),
        ("it's $5.00", ["its 500"], 1),
        ("“Ça va” – l’été…", ["ça va lété"], 1),
        ("Cafe\u0301", ["caf\u00e9"], 1),
        # Repeated words count as often as both sides have them.
        ("no no no", ["no"], 0.5),
        ("Yes.", ["yes"], 1),
        ("", ["yes"], 0),
        ("", [""], 1),
        ("the", ["a"], 1),
        ("something", [""], 0),
        ("Москва", ["москва"], 1),
    ],
)
def test_f1(prediction, answers, f1):
    assert word_f1(prediction, answers) == pytest.approx(f1)


def test_scores_without_gold_answers_are_undefined():
    assert word_f1("x", []) is None
    assert names_one("x", ()) is None
    assert exact_match("x", ()) is None
    assert rouge_l("x", ()) is None


@pytest.mark.parametrize(
    ("prediction", "answers", "match"),
    [
        ("The  Panthers!", ["Carolina", "panthers"], 1),
        ("the Carolina Panthers", ["Carolina", "Panthers"], 0),
        ("", ["the"], 1),
        ("1,000", ["1000"], 1),
    ],
)
def test_exact_match(prediction, answers, match):
    assert exact_match(prediction, answers) == match


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        # By hand: the longest common subsequence over the words of both, as F-measure.
        ("the cat sat on the mat", ["the cat was on the mat"], 5 / 6),
        ("a b c d", ["a x b y"], 2 * (2 / 4) * (2 / 4) / (2 / 4 + 2 / 4)),
        ("one two", ["one two three four"], 2 * 1 * 0.5 / 1.5),
        ("x", ["y", "x z"], 2 / 3),
        # The example of Lin 2004; stems make the first one equal.
        ("police kill the gunman", ["police killed the gunman"], 1),
        ("the gunman kill police", ["police killed the gunman"], 0.5),
        ("", ["anything"], 0),
        # Words of other scripts count; the package's own tokenizer drops them.
        ("Der Hafen hat neun Türme", ["Der Hafen hat zehn Türme"], 4 / 5),
        ("порт открыт", ["порт закрыт"], 1 / 2),
    ],
)
def test_rouge_l(prediction, answers, score):
    assert rouge_l(prediction, answers) == pytest.approx(score)


def test_rouge_measures_long_answers_and_summaries():
    long = " ".join(["word"] * 12)
    assert wants_rouge([long, long], "qa")
    assert not wants_rouge([long, "word " * 11], "qa")
    assert wants_rouge(["short"], "Summarization")
    assert not wants_rouge((), "summary")


def test_rouge_names_its_package(monkeypatch):
    assert has_rouge()
    for module in ("rouge_score", "rouge_score.rouge_scorer"):
        monkeypatch.setitem(sys.modules, module, None)
    assert not has_rouge()


@pytest.mark.parametrize(
    ("said", "gold", "right"),
    [
        ("It has 27 airports.", "27", True),
        ("It has 270 airports.", "27", False),
        ("81843,56704", "56704", True),
        ("It is 12,500.", "12500", True),
        ("THE Panthers!", "the panthers", True),
        ("bluedoor", "blue door", False),
        ("", "1", False),
        ("anything", "...", False),
    ],
)
def test_an_answer_is_right_if_it_names_a_gold_answer(said, gold, right):
    assert names_one(said, ("Carolina", gold)) is right
