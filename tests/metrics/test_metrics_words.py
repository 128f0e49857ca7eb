import pytest

from blend.eval.metrics import names_one, word_f1

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
