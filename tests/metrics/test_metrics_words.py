import pytest

from blend.eval.metrics import names_one, normalise_answer, word_f1

SUPER_BOWL_VENUE = [
    "Santa Clara, California",
    "Levi's Stadium",
    "Levi's Stadium in the San Francisco Bay Area at Santa Clara, California.",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  quick, brown\tfox!", "quick brown fox"),
        ("An apple a day", "apple day"),
        ("theatre and banana", "theatre and banana"),
        ("U.S.A.", "usa"),
        ("it's", "its"),
        ("“Ça va” – l’été…", "ça va lété"),
        ("Cafe\u0301", "caf\u00e9"),
        ("$5.00", "500"),
        ("The", ""),
        ("", ""),
    ],
)
def test_normalisation(text, expected):
    assert normalise_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "f1"),
    [
        # From the metric card of the SQuAD evaluation at HuggingFace.
        ("1976", ["1976"], 1),
        ("1999", ["1976"], 0),
        ("Beyonce", ["Beyoncé and Bruno Mars"], 0),
        ("climate change", ["climate change"], 1),
        # By hand on the SQuAD development set: 2 of 3 words right against 2 gold words.
        ("Levi's Stadium, Seattle", SUPER_BOWL_VENUE, 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("at Levi's Stadium", ["Levi's Stadium"], 0.8),
        ("the Levi's stadium", SUPER_BOWL_VENUE, 1),
        # Repeated words count as often as both sides have them.
        ("no no no", ["no"], 0.5),
        ("go go stop", ["go go"], 0.8),
        ("yes", ["yes"], 1),
        ("Yes.", ["yes"], 1),
        ("yes it was", ["yes"], 0.5),
        ("no", ["yes"], 0),
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
