"""The groups of methods, and what their names say."""

from __future__ import annotations

import pytest

from blend.errors import ConfigError
from blend.eval.evaluator import FULL as EVALUATORS_FULL
from blend.eval.evaluator import PLAIN_REUSE
from study.methods import BASELINE, FULL, GROUPS, REUSE, methods, named, ratio_of


@pytest.mark.parametrize("group", GROUPS)
def test_names_say_the_ratio(group: str) -> None:
    """The picture and the tables read the ratio of a method from its name."""
    for name, config in methods(group).items():
        selector = config.plain()["selector"]
        if selector not in ("none", "all") or " %" in name:
            assert ratio_of(name)[1] == (0 if selector == "none" else round(config.ratio * 100)), name


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_what_the_tables_compare_with(group: str) -> None:
    found = methods(group)
    assert found[REUSE] == PLAIN_REUSE
    assert (found[BASELINE].plain()["selector"], found[BASELINE].mask, found[BASELINE].correction) == (
        "hkvd",
        "bottom-right",
        False,
    )
    assert FULL == EVALUATORS_FULL
    assert FULL not in found


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("query 5 %", ("query", 5)),
        ("query", ("query", 15)),
        ("query 5 %, map only", ("query, map only", 5)),
        ("hkvd K layer 3", ("hkvd K layer 3", 15)),
        ("query 30 %, 8-17", ("query, 8-17", 30)),
    ],
)
def test_a_name_is_taken_apart(name: str, parts: tuple[str, int]) -> None:
    assert ratio_of(name) == parts
    if " %" in name:
        assert named(name.split(" ")[0], parts[1] / 100, name.partition("%")[2]) == name


def test_an_unknown_group_is_refused_with_the_groups() -> None:
    with pytest.raises(ConfigError, match="choose one of base, finalists"):
        methods("bas")
