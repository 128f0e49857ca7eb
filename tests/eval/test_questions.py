"""Files of questions over a corpus: plain text or JSON, one a line."""

import pytest

from blend.errors import DatasetError
from blend.eval.dataset import QUESTION_LINE, Question, parse_questions


def test_plain_lines():
    text = "\ufeff \n  What is {this}?\t\r\n\r42\rWho?\u2028And why?\x0b\x85\n[1]"
    texts = [question.text for question in parse_questions(text.removeprefix("\ufeff"), "q.txt")]
    assert texts == ["What is {this}?", "42", "Who?\u2028And why?", "[1]"]


def test_lines_of_json_bring_gold_answers_and_tasks():
    lines = [
        "",
        QUESTION_LINE,
        '{"question": " Who\\u2028? ", "task": "names", "id": 7}',
        '{"question": "W", "answers": null}',
    ]
    assert parse_questions("\n".join(lines), "q") == [
        Question("...", ("...",)),
        Question("Who\u2028?", (), "names"),
        Question("W", ()),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "q.txt: no question in it; write one a line"),
        (" \n\n", "q.txt: no question in it"),
        ('{"question": "a"}\n\nWhy?', "q.txt:3: no JSON object, as the first line is; write all lines as"),
        ('{"question": "a"}\n{"question": "b"', "q.txt:2: no JSON object"),
        ('Why?\n{"question": "a"}', "q.txt:2: a JSON object, and the first line is none"),
        ('{"question": "a"}\n{"answers": ["b"]}', 'q.txt:2: "question" must be text; expected {"question"'),
        ('{"question": " "}', 'q.txt:1: "question" is empty'),
        ('{"question": "a", "answers": "b"}', 'q.txt:1: "answers" must be a list'),
        ('{"question": "a", "answers": [1]}', 'q.txt:1: "answers" must be text'),
        ('{"question": "\\ud800"}', 'q.txt:1: "question" must be text'),
    ],
)
def test_a_file_that_is_neither_is_refused_with_the_line(text, problem):
    with pytest.raises(DatasetError) as error:
        parse_questions(text, "q.txt")
    assert str(error.value).startswith(problem)
