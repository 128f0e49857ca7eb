import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.eval.metrics import exact_match, normalise_answer, rouge_l, value_recall, word_f1

SUPER_BOWL_VENUE = [
    "Santa Clara, California",
    "Levi's Stadium",
    "Levi's Stadium in the San Francisco Bay Area at Santa Clara, California.",
]
ascii_text = st.text(st.sampled_from(string.ascii_letters + string.digits + " .,'-!\n"), max_size=60) | st.lists(
    st.sampled_from(["the", "a", "An", "cat", "Cat,", "dogs", "running", "runs", "42", "(42)", "it's"])
).map(" ".join)


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
    ("prediction", "answers", "f1", "em"),
    [
        # From the metric card of the SQuAD evaluation at HuggingFace.
        ("1976", ["1976"], 1, 1),
        ("1999", ["1976"], 0, 0),
        ("Beyonce", ["Beyoncé and Bruno Mars"], 0, 0),
        ("climate change", ["climate change"], 1, 1),
        # By hand on the SQuAD development set: 2 of 3 words right against 2 gold words.
        ("Levi's Stadium, Seattle", SUPER_BOWL_VENUE, 2 * (2 / 3) * 1 / (2 / 3 + 1), 0),
        ("at Levi's Stadium", ["Levi's Stadium"], 0.8, 0),
        ("the Levi's stadium", SUPER_BOWL_VENUE, 1, 1),
        # Repeated words count as often as both sides have them.
        ("no no no", ["no"], 0.5, 0),
        ("go go stop", ["go go"], 0.8, 0),
        ("yes", ["yes"], 1, 1),
        ("Yes.", ["yes"], 1, 1),
        ("yes it was", ["yes"], 0.5, 0),
        ("no", ["yes"], 0, 0),
        ("", ["yes"], 0, 0),
        ("", [""], 1, 1),
        ("the", ["a"], 1, 1),
        ("something", [""], 0, 0),
        ("Москва", ["москва"], 1, 1),
    ],
)
def test_f1_and_exact_match(prediction, answers, f1, em):
    assert word_f1(prediction, answers) == pytest.approx(f1)
    assert exact_match(prediction, answers) == em


def test_scores_without_gold_answers_are_undefined():
    assert word_f1("x", []) is None
    assert exact_match("x", []) is None
    assert rouge_l("x", []) is None
    assert value_recall("x", []) is None


@pytest.mark.parametrize(
    ("prediction", "values", "expected"),
    [
        ("81843, 56704 and 56238", ["81843", "56704", "56238"], 1),
        ("81843,56704", ["81843", "56704", "56238"], 2 / 3),
        ("181843", ["81843"], 0),
        ("the Blue Door, the red door", ["red door", "a blue door"], 1),
        ("It is 12,500.", ["12,500", "12500"], 1),
        ("bluedoor", ["blue door"], 0),
        ("", ["1"], 0),
        ("anything", ["..."], 0),
    ],
)
def test_value_recall(prediction, values, expected):
    assert value_recall(prediction, values) == pytest.approx(expected)


def test_rouge_l_of_lins_example():
    # Lin 2004, section 3.1: S2 shares "police the gunman" with the reference, S3 "the gunman" only.
    reference = ["police killed the gunman"]
    assert rouge_l("police kill the gunman", reference) == 1
    assert rouge_l("the gunman kill police", reference) == pytest.approx(0.5)


@given(ascii_text, ascii_text)
def test_rouge_l_of_ascii_text_is_that_of_the_package(prediction, answer):
    from rouge_score.rouge_scorer import RougeScorer

    expected = RougeScorer(["rougeL"], use_stemmer=True).score(answer, prediction)["rougeL"].fmeasure
    assert rouge_l(prediction, [answer]) == pytest.approx(expected)


def test_rouge_l_counts_words_of_other_scripts_and_takes_the_best_answer():
    assert rouge_l("столица Москва", ["Москва столица", "столица Москва"]) == 1
    assert rouge_l("été", ["ete"]) == 0
    assert rouge_l("", ["x"]) == 0


def test_missing_rouge_package_names_the_remedy():
    code = (
        "import sys; sys.modules['rouge_score.rouge_scorer'] = None\n"
        "from blend.errors import ConfigError\nfrom blend.eval.metrics import rouge_l\n"
        "try: rouge_l('x', ['x'])\nexcept ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'kvblend[report]'" in done.stdout
