"""`scripts/bench_peers locomo` on made-up conversations in LoCoMo's format, with a tiny model."""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile

import pytest
from commands import ENVIRONMENT, ROOT, main, module, printed

from blend.errors import ConfigError, DatasetError
from tests.tiny_model import save_tiny_model

METHODS = ["no context", "full", "plain reuse", "published selection, 15 %", "kvblend, 5 %", "kvblend, 15 %"]
THINGS = ("kayak", "violin", "greenhouse", "telescope", "bicycle", "accordion", "lantern")


def conversation(names):
    """A conversation of seven sessions, each about a thing of its own, with a question of each category."""
    first, second = names
    content = {"speaker_a": first, "speaker_b": second, "session_8": [], "session_8_date_time": "never"}
    for number, thing in enumerate(THINGS, 1):
        texts = [
            f"I bought a {thing} for {number}0 dollars.",
            f"A {thing}! What colour is your {thing}?",
            "It is green.",
        ]
        turns = [
            {"speaker": names[place % 2], "text": text, "dia_id": f"D{number}:{place}"}
            for place, text in enumerate(texts)
        ]
        turns[0]["blip_caption"] = f"a photo of a {thing}"
        content |= {f"session_{number}": turns, f"session_{number}_date_time": f"1:0{number} pm on {number} May, 2023"}
    asked = [
        {"question": f"When did {first} buy a kayak?", "answer": "1 May 2023", "evidence": ["D1:0"], "category": 2},
        {"question": "What is the colour of the violin?", "answer": "green", "evidence": ["D2:2; D2:1"], "category": 4},
        {
            "question": "Would a bicycle, a bicycle bell and a telescope fit?",
            "answer": "yes; both",
            "evidence": ["D5:0", "D4:1"],
            "category": 3,
        },
        {
            "question": "Which things cost 10 or 20?",
            "answer": "kayak, violin",
            "evidence": ["D1:0", "D2:0"],
            "category": 1,
        },
        {"question": f"Who sold {second} a kayak?", "adversarial_answer": "an aunt", "evidence": [], "category": 5},
    ]
    return {**content, "qa": asked}


CONVERSATIONS = {"2": conversation(("Ada", "Ben")), "10": conversation(("Cleo", "Dan"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Each conversation in a file, and a tiny model."""
    folder = tmp_path_factory.mktemp("locomo")
    (folder / "data").mkdir()
    for name, content in CONVERSATIONS.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(content))
    save_tiny_model(folder / "tiny", json.dumps(CONVERSATIONS["2"]["session_1"]), initializer_range=0.4)
    return folder


def asked(folder, questions, *options, data="data", file=None):
    """The command's options, with a store that is calibrated once. The first two questions ask for the same sessions."""
    kept = ("--store", folder / "store", "--questions", questions)
    common = ("--json", file or folder / "l.json", "--model", folder / "tiny", "--sessions", 2, "--threads", 1)
    return ("--data", folder / data, *common, *kept, "--answer-tokens", 4, *options)


def run(folder, questions, *options, **named):
    return printed("bench_peers", "locomo", *asked(folder, questions, *options, **named))


def show(file, *options):
    return printed("bench_peers", "locomo", "--json", file, "--show", *options)


def test_every_method_answers_every_question_in_both_orders(folder):
    table = run(folder, 1)
    rows = json.loads((folder / "l.json").read_text())["rows"]
    assert [row["method"] for row in rows] == 2 * METHODS
    assert len({(row["conversation"], row["question"]) for row in rows}) == 2
    by_method = {name: [row for row in rows if row["method"] == name] for name in METHODS}
    assert all(len(row["reverse_answer"]) > 0 for row in rows if row["method"] != "no context")
    assert any(row["answer"] != row["reverse_answer"] for row in by_method["full"]), "the sessions changed places"
    for alone, full, reuse, published, few, many in zip(*by_method.values(), strict=True):
        assert alone["rows"] < full["rows"] == many["rows"]
        assert full["share"] == full["charged"] == 1
        assert reuse["share"] == reuse["charged"] < few["share"] < few["charged"] < many["charged"] < 1
        assert published["share"] == published["charged"] > 0.25, "the layers below the check layer run on all rows"
    assert "2 conversations, 2 questions" in table
    assert "| published selection, 15 % | " in table
    more = run(folder, 2)
    assert json.loads((folder / "l.json").read_text())["rows"][: len(rows)] == rows, "what was there is not asked again"
    heads = more.splitlines()[1]
    assert heads == "| score | several sessions (2) | time (1) | one session (1) | all (4) |"
    published = folder / "published.json"
    assert show(folder / "l.json", "--without-texts", published) == more
    assert show(published) == more
    rows = json.loads(published.read_text())["rows"]
    assert all(re.fullmatch("[0-9a-f]{12}", row["answer"]) for row in rows)
    assert not any(text in published.read_text() for text in ("1 May 2023", "kayak", "gold", str(folder / "l.json")))
    (folder / "fewer").mkdir()
    (folder / "fewer" / "2.json").write_text(json.dumps(CONVERSATIONS["2"]))
    with pytest.raises(SystemExit, match="measured with other options"):
        run(folder, 2, data="fewer")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
import _locomo
replace, saves = Path.replace, []
def replace_or_die(draft, target):
    saves.append(target)
    if len(saves) == {saves}:
        draft.write_text(draft.read_text()[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(draft, target)
Path.replace = replace_or_die
_locomo.main(sys.argv[1:])
"""


def test_a_run_that_is_killed_while_it_writes_goes_on_where_it_was(folder, tmp_path):
    """Killed at the third row of its second question: that question is asked again, the first one is not."""
    run(folder, 1)
    whole = json.loads((folder / "l.json").read_text())["rows"][: 2 * len(METHODS)]
    script = KILLED.format(scripts=str(ROOT / "scripts"), saves=len(METHODS) + 4)
    words = [sys.executable, "-c", script, *map(str, asked(folder, 1, file=tmp_path / "l.json"))]
    killed = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = json.loads((tmp_path / "l.json").read_text())
    assert len(before["rows"]) == len(METHODS) + 2
    shown = run(folder, 1, file=tmp_path / "l.json")
    after = json.loads((tmp_path / "l.json").read_text())
    assert after["rows"][: len(METHODS)] == before["rows"][: len(METHODS)]
    assert after["options"] == before["options"]
    assert [told(row) for row in after["rows"]] == [told(row) for row in whole]
    assert "2 conversations, 2 questions" in shown


def told(row):
    """What a row says but for times."""
    return {name: value for name, value in row.items() if not name.endswith("_s")}


def test_a_store_that_was_calibrated_on_a_session_is_not_asked_about_it(folder, tmp_path):
    run(folder, 1, file=tmp_path / "l.json")
    with pytest.raises(ConfigError, match=r"was calibrated on session \d+/\d, now asked about: name another --store"):
        run(folder, 5, file=tmp_path / "l.json")


@pytest.fixture(params=["list", "zip", "folder"])
def read(request, tmp_path):
    """The conversations, read from each form that LoCoMo has had."""
    if request.param == "list":
        file = tmp_path / "locomo10.json"
        parts = [
            {"sample_id": f"conv-{name}", "conversation": each, "qa": each["qa"]}
            for name, each in CONVERSATIONS.items()
        ]
        file.write_text(json.dumps(parts))
    elif request.param == "zip":
        file = tmp_path / "locomo10.zip"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("__MACOSX/._2.json", b"\0")
            for name, each in CONVERSATIONS.items():
                archive.writestr(f"data/{name}.json", json.dumps(each))
    else:
        file = tmp_path
        for name, each in CONVERSATIONS.items():
            (file / f"{name}.json").write_text(json.dumps(each))
    return module("_locomo_data.py").read_conversations(file)


def test_a_question_is_asked_over_the_sessions_of_its_words_in_the_order_of_time(read):
    assert [each.name for each in read] == ["10", "2"]
    bicycle = next(question for question in read[1].questions if question.category == 3)
    asked = module("_locomo.py").retrieved(read[1], bicycle, 2)
    assert asked.sessions == (4, 5)
    assert asked.recall == 1
    first, second = asked.record(asked.sessions).chunks
    assert first.title == "DATE: 1:04 pm on 4 May, 2023"
    lines = first.text.split("\n")
    assert lines[0] == 'Ada said, "I bought a telescope for 40 dollars." and shared a photo of a telescope.'
    assert lines[1].startswith("Ben said, ")
    assert "bicycle" in second.text
    assert len(read[1].sessions) == 7, "a session without words is none"


@pytest.mark.parametrize(
    ("category", "gold", "answer", "score"),
    [
        (4, "The green violins", "A green violin.", 1),
        (4, "green violin", "It is green", 2 / 5),
        (4, "green", "red\nIt is green.", 0),
        (4, "1,000 dollars", "1000 dollars", 1),
        (4, "green", "", 0),
        (2, "7 May 2023", "May 2023", 4 / 5),
        (3, "yes; since both are small", "Yes", 1),
        (1, "kayak, violin", "a violin, a lamp", 1 / 2),
        (1, "kayak, green violin", "kayaks, violin", (1 + 2 / 3) / 2),
        (4, "kayak, violin", "violin, kayak", 1),
        (5, "an aunt", "an aunt", 0),
        (5, "an aunt", "It was not mentioned.", 1),
        (5, "an aunt", "There is no information available", 1),
    ],
)
def test_scores_are_those_of_locomo(category, gold, answer, score):
    data = module("_locomo_data.py")
    question = data.Question(0, category, "Who sold it?", gold, frozenset())
    assert data.score(question, answer) == pytest.approx(score)


def test_the_letter_of_an_option_counts_as_the_option():
    data = module("_locomo_data.py")
    asked = [data.Question(number, 5, f"Who sold lamp {number}?", "an aunt", frozenset()) for number in range(9)]
    right = [{letter: data.score(question, letter) for letter in ("a", "(b)")} for question in asked]
    assert {tuple(sorted(scores.values())) for scores in right} == {(0, 1)}
    assert {scores["a"] for scores in right} == {0, 1}, "the right option is not always the same letter"
    for question, scores in zip(asked, right, strict=True):
        wanted = "(a) Not mentioned" if scores["a"] else "(b) Not mentioned"
        assert wanted in data.asked_text(question)


def test_intervals_are_over_conversations_not_over_questions():
    locomo = module("_locomo.py")
    rows = [{"conversation": name, "score": float(name < "d")} for name in "abcdef" for _ in range(50)]
    interval = locomo.clustered(rows, "score")
    assert interval.mean == 0.5
    assert interval.high - interval.low > 0.6, "six conversations say little, however many questions they have"
    assert locomo.cell(locomo.clustered(rows[:200], "score")) == "0.75", "four say nothing of the spread"


def test_the_page_shows_the_tables_of_the_published_rows():
    page = (ROOT / "docs" / "peers.md").read_text().splitlines()
    tables = show(ROOT / "docs" / "results" / "locomo.json").splitlines()
    assert set(tables) <= set(page)


@pytest.mark.parametrize(
    ("content", "words"), [("", "is not JSON; name locomo10.json"), ("{}", "no LoCoMo conversation with questions")]
)
def test_another_file_is_refused(folder, content, words):
    (folder / "other.json").write_text(content)
    with pytest.raises(DatasetError, match=words):
        run(folder, 1, data="other.json")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--data locomo10\.json"):
        main("bench_peers", "locomo", "--json", tmp_path / "new.json")
    with pytest.raises(ConfigError, match="run it without --show"):
        main("bench_peers", "locomo", "--json", tmp_path / "new.json", "--show")
