"""`scripts/mutate`: what it breaks, and whether it says which tests notice, on a toy project."""

import json

import pytest
from commands import command

from _mutants import mutants_of

PRICES = '''"""Prices."""

import logging

log = logging.getLogger(__name__)


def total(prices, most=3):
    """Of at most 3 prices."""
    if len(prices) > most:
        raise ValueError(f"at most {most + 0}")
    log.info("a total")
    return sum(prices)


def discount(price):
    return price - 1


def unused(price):
    return price + 1
'''
TESTS = """
import pytest
from shop.prices import discount, total


def test_total():
    assert total([1, 2, 3]) == 6
    assert total([]) == 0
    with pytest.raises(ValueError, match="at most"):
        total([1, 2, 3, 4])


def test_discount_is_weak():
    assert discount(5) is not None
"""


BROKEN_TEST = """
from shop.prices import unused


def test_that_fails():
    assert not unused(1)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A project whose mutants have all been tried, and its report."""
    folder = tmp_path_factory.mktemp("toy")
    for name, text in {
        "tree/shop/prices.py": PRICES,
        "tree/tests/test_prices.py": TESTS,
        "tree/tests/test_broken.py": BROKEN_TEST,
        "tree/pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
        "rooms.toml": "[shop]\nsources = ['shop/*.py']\ntests = ['tests/test_*.py']\n",
    }.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    ended = mutate(folder, "--count", 50)
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stdout


def mutate(folder, *options):
    places = ("--tree", folder / "tree", "--rooms", folder / "rooms.toml", "--out", folder / "out")
    return command("mutate", *places, *options)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "out" / "shop.jsonl").read_text().splitlines()]


def replacements(source):
    return {(mutant.operator, mutant.before, mutant.after) for mutant in mutants_of("a.py", source.encode())}


def test_survivors_are_those_whose_tests_are_weak(toy):
    folder, printed = toy
    rows = rows_of(folder)
    statuses = {(row["line"], row["before"]): row["status"] for row in rows}
    assert statuses[10, "len(prices) > most"] == statuses[11, 'raise ValueError(f"at most {most + 0}")'] == "killed"
    assert statuses[17, "price - 1"] == statuses[17, "1"] == "survived"
    assert statuses[21, "price + 1"] == "unreached"
    assert {row["killer"] for row in rows if row["line"] == 11} == {"tests/test_prices.py::test_total"}
    assert "survived: shop/prices.py:17 sum: price - 1 -> (price + 1)" in printed


def test_a_test_that_fails_without_a_mutant_judges_none(toy):
    folder, _ = toy
    assert "test_that_fails" not in (folder / "out" / "shop.jsonl").read_text()


def test_a_run_that_was_killed_goes_on_and_leaves_no_mutant(toy):
    folder, _ = toy
    rows = rows_of(folder)
    assert rows[-1]["tests"] > 0, "the last was tried"
    text = "".join(json.dumps(row) + "\n" for row in rows[:-1])
    (folder / "out" / "shop.jsonl").write_text(text)
    copy = folder / "out" / "tree" / "shop" / "prices.py"
    journal = {"path": "shop/prices.py", "source": PRICES, "changed": copy.stat().st_mtime_ns}
    (folder / "out" / "work" / "mutated.json").write_text(json.dumps(journal))
    copy.write_text(PRICES.replace("price - 1", "price + 1"))
    ended = mutate(folder, "--count", 50)
    assert ended.returncode == 0, ended.stderr
    assert {row["name"]: row["status"] for row in rows_of(folder)} == {row["name"]: row["status"] for row in rows}
    assert len(ended.stderr.splitlines()) == 1
    assert copy.read_text() == (folder / "tree" / "shop" / "prices.py").read_text() == PRICES


def test_a_room_that_is_not_there_is_refused_in_one_line(toy):
    folder, _ = toy
    ended = mutate(folder, "--room", "cellar")
    assert ended.returncode == 1
    assert ended.stderr == "no room cellar: there are shop\n"


@pytest.mark.parametrize(
    ("source", "replacement"),
    [
        ("x = a < b", ("comparison", "a < b", "(a <= b)")),
        ("x = a < b", ("comparison", "a < b", "(a >= b)")),
        ("x = a < b < c", ("comparison", "a < b < c", "(a < b <= c)")),
        ("x = a is None", ("comparison", "a is None", "(a is not None)")),
        ("x = a and b", ("logic", "a and b", "(a or b)")),
        ("x = not a", ("no not", "not a", "(a)")),
        ("x = 3", ("number", "3", "(2)")),
        ("x = 'ä' + b", ("sum", "'ä' + b", "('ä' - b)")),
        ("x += 1", ("sum", "x += 1", "x -= 1")),
        ("x = min(a, b)", ("extreme", "min", "max")),
        ("def f():\n    return a or b", ("opposite", "a or b", "(not (a or b))")),
        ("def f():\n    return True", ("opposite", "True", "False")),
        ("def f():\n    return a", ("none", "a", "None")),
        ("def f():\n    if a:\n        return b\n    return c", ("no return", "return b", "pass")),
        ("def f():\n    if a:\n        raise E(1)\n    return c", ("no raise", "raise E(1)", "pass")),
        ("for a in b:\n    c(a)", ("no call", "c(a)", "pass")),
        ("if a:\n    b()", ("always", "a", "True")),
        ("x = b if a else c", ("never", "a", "False")),
    ],
)
def test_what_is_broken(source, replacement):
    assert replacement in replacements(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Text 1."""',
        "x: Literal[1]",
        "if TYPE_CHECKING:\n    import a",
        "log.info('a', 1 + 2)",
        "x = f'{a + 1}'",
        "assert a < 1",
        "@triton.jit\ndef f(a):\n    return a + 1",
    ],
)
def test_what_is_left_alone(source):
    assert replacements(source) == set()


def test_a_replacement_changes_its_place_alone():
    source = "x = 'ä'; y = (a +\n  1) # one\n".encode()
    texts = {mutant.applied(source).decode() for mutant in mutants_of("a.py", source)}
    assert texts == {f"x = 'ä'; y = {after} # one\n" for after in ("((a - 1))", "(a +\n  (2))", "(a +\n  (0))")}
