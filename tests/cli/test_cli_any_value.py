"""Any value for any option of any command: refused in one line with exit code 2, or good for everything that takes it later."""

import io
import math
import os
from contextlib import redirect_stderr
from dataclasses import fields
from typing import Any

import click
import pytest
from blend_process import one_line
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blend import BlendConfig
from blend.cli import blend as group
from blend.cli import exit_code_of
from blend.config import CorpusConfig
from blend.errors import ConfigError
from blend.select import SELECTORS, make_selector
from blend.select.base import MEANINGS

NASTY = (
    *("nan", "inf", "-inf", "1e300", "1e400", "-1", "-0.0", "0", "1", "0.5", "5e-324", "1e-7", "1e6", str(10**30)),
    *("9" * 5000, "١٢", "", " 3 ", "1_000", "0x10", "True", "3.0", "1e3", "\udcff", "\x1b[2J\n", "½", "+7"),
)
LAYERS = ("0-9999999999", "5-3", "--3", "3-", "+", "9" * 5000, "0-" + "9" * 30, "1+1", "1;2", "٣", "0-9999+0-9999")
TEXTS = st.binary(max_size=8).filter(lambda value: b"\0" not in value).map(os.fsdecode)  # what an argument can be


# Specs of selectors: every key for every selector, with what anything may be; and what has the form of a spec and is none.
KEYS = sorted(MEANINGS)
PAIRS = st.tuples(st.sampled_from(KEYS), st.sampled_from((*NASTY, *LAYERS, "auto", "true")) | TEXTS).map("=".join)
LISTS = st.lists(PAIRS | TEXTS, max_size=3).map(",".join)
SPECS = st.tuples(st.sampled_from(list(SELECTORS)) | TEXTS, LISTS).map(":".join)

with click.Context(group) as context:
    COMMANDS = {name: group.get_command(context, name) for name in group.list_commands(context)}
VALUED = {
    (name, option.opts[0]): option
    for name, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag
}


def parsed(name: str, flag: str, value: str) -> dict[str, Any] | None:
    """What the command would be called with, checked as far as it can be without a model; None after a refusal in one line."""
    command = COMMANDS[name]
    needed = ["x" for parameter in command.params if isinstance(parameter, click.Argument) and parameter.required]
    found: dict[str, Any] = {}

    def parse() -> None:
        found.update(command.make_context(name, [f"{flag}={value}", *needed]).params)

    with redirect_stderr(io.StringIO()) as output:
        code = exit_code_of(parse)
    if code == 0:
        return found
    told = output.getvalue()
    assert code == 2, told
    assert told.count("\n") == 1
    assert flag in one_line(told)
    assert len(told) < 400 or isinstance(VALUED[name, flag].type, click.Choice)  # click quotes it whole
    assert not any(character < " " or "\x7f" <= character < "\xa0" for character in told[:-1])
    return None


def check(name: str, flag: str, value: str) -> None:
    if flag == "--ray" and value.startswith("-"):  # it may stand without a value: click takes this for another option
        return
    options = parsed(name, flag, value)
    if options is None:
        return
    for number in options.values():
        assert not isinstance(number, float) or math.isfinite(number)
        assert not isinstance(number, int) or abs(number) < 2**63
    if flag == "--selector":
        (spec,) = options["selectors"] if "selectors" in options else (options["selector"],)
        assert make_selector(spec) == make_selector(value)
        assert make_selector(spec).spec == spec
        assert spec.isprintable()
    for config in (BlendConfig, CorpusConfig):
        known = {field.name for field in fields(config)}
        config(**{key: found for key, found in options.items() if key in known and found is not None})
    if options.get("store_budget") is not None:
        assert int(options["store_budget"] * 1e9) > 0


@settings(max_examples=600, deadline=None, derandomize=True)
@given(which=st.sampled_from(list(VALUED)), value=TEXTS | st.floats().map(str) | st.integers().map(str))
def test_a_value_is_refused_in_one_line_or_good_for_all(which, value):
    check(*which, value)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(name=st.sampled_from(["answer", "report", "analyze"]), spec=SPECS)
@example("report", "hkvd:check_layer=١٢")
@example("answer", "hkvd:" + ",".join(["lead=1"] * 5000))
def test_a_spec_is_refused_in_one_line_or_good_for_all(name, spec):
    check(name, "--selector", spec)


def test_values_that_broke_things_before_and_that_every_number_has_limits():
    """An option that is a number and forgets its limits would take infinity, or what no machine can hold."""
    bare = (click.types.IntParamType, click.types.FloatParamType)
    for (name, flag), option in VALUED.items():
        assert not isinstance(option.type, bare), f"{name} {flag}: make it with blend.cli.options.number"
        is_number = option.type.name in ("integer", "float")
        for value in NASTY if is_number else NASTY[-8:]:
            check(name, flag, value)
        for value in ("nan", "inf", "-inf", "1e300", "-1", "9" * 5000, str(10**30), "") if is_number else ():
            assert parsed(name, flag, value) is None


def refusal_of(config: type, **values: Any) -> str:
    """What it says of these values; "" if it takes them."""
    try:
        config(**values)
    except ConfigError as error:
        return str(error)
    return ""


ODD = (math.nan, math.inf, -math.inf, 1e300, -1, 10**30, 10**5000, True, "1", None, [], 2.5, -0.5)


@pytest.mark.parametrize("config", [BlendConfig, CorpusConfig])
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_python_refuses_the_same(config, data):
    """A number of a configuration is of its kind and within its limits; anything else is refused in one line."""
    numbers = [field for field in fields(config) if type(field.default) in (int, float)]
    field = data.draw(st.sampled_from(numbers))
    value = data.draw(st.sampled_from(ODD) | st.floats() | st.integers())
    refusal = refusal_of(config, **{field.name: value})
    if refusal:
        assert refusal.startswith(f"{field.name}: ")
        assert "\n" not in refusal
        assert len(refusal) < 200
        return
    assert type(value) is type(field.default) or (type(value) is int and type(field.default) is float)
    assert 0 <= value <= 2**32


@pytest.mark.parametrize(
    "wrong",
    [{"correction": 1}, {"selector": "hkvd:selector=" + "9" * 5000}, {"mask": ["exact"]}, {"surrogate": None}],
    ids=lambda wrong: str(wrong)[:40],
)
def test_python_refuses_other_kinds_of_values(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        BlendConfig(**wrong)
    assert len(str(caught.value)) < 200


def test_the_largest_values_answer(filled):
    """What parses at the upper bound does not blow up later."""
    for selector in ("mixed:lead=1000000", "first_k:k=1000000", f"random:seed={2**32 - 1}"):
        filled.answer("--selector", selector, "--top-k", "10000", "--store-budget", "1000000")
