"""Selectors as text: what is written is read back, what cannot be read is refused in one line that says what could."""

import subprocess
import sys
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend import BlendConfig
from blend.errors import ConfigError
from blend.ranges import NUMBERS
from blend.select import SELECTORS, FirstK, Gradual, HighDeviation, QueryGuided, Random, Selector, make_selector
from blend.select.base import MEANINGS, allowed, defaults, parameters, summary

LAYERS = st.sampled_from(["all", "middle", "upper", "3", "4-9", "3+7+12-15", "0-9999"])


def _values(kind: type[Selector], name: str) -> st.SearchStrategy[Any]:
    """Everything that a parameter may be."""
    if name in NUMBERS:
        low, high = NUMBERS[name].low, NUMBERS[name].high
        number = st.integers(int(low), int(high)) if NUMBERS[name].whole else st.floats(low, high)
        return number | st.none() if name in ("lead", "k") else number
    if name == "layers":
        return LAYERS
    return st.sampled_from(get_args(get_type_hints(kind)[name]))


@st.composite
def selectors(draw: st.DrawFn) -> Selector:
    kind = SELECTORS[draw(st.sampled_from(sorted(SELECTORS)))]
    return kind(**{field.name: draw(_values(kind, field.name)) for field in parameters(kind)})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(selector=selectors())
def test_a_spec_is_read_back(selector):
    again = make_selector(selector.spec)
    assert again == selector
    assert again.spec == selector.spec
    assert BlendConfig(selector).plain()["selector"] == BlendConfig(selector.spec).plain()["selector"] == selector.spec


@pytest.mark.parametrize(
    ("selector", "spec"),
    [
        (QueryGuided(), "query_guided"),
        (QueryGuided("3+7+12-15"), "query_guided:layers=3+7+12-15"),
        (HighDeviation(2, "kv", lead=8), "hkvd:check_layer=2,of=kv,lead=8"),
        (Gradual(2, first=1.25), "gradual:check_layer=2,first=1.25"),
        (FirstK(4), "first_k:k=4"),
        (Random(3), "random:seed=3"),
    ],
)
def test_what_a_spec_looks_like(selector, spec):
    assert selector.spec == spec
    assert make_selector(spec) == selector


def test_what_is_at_its_default_may_be_said_and_is_not_written():
    assert make_selector("query_guided:layers=middle,lead=auto").spec == "query_guided"
    assert make_selector("first_k:k=auto") == FirstK()
    assert BlendConfig().plain()["selector"] == "query_guided"


@pytest.mark.parametrize("kind", SELECTORS.values(), ids=SELECTORS)
def test_a_list_tells_what_a_selector_does_and_its_defaults_as_a_spec_has_them(kind):
    assert summary(kind).isprintable()
    assert summary(kind)[-1].isalpha()
    written = defaults(kind).replace(", ", ",")
    assert make_selector(f"{kind.name}:{written}" if written else kind.name) == kind()


REFUSED = {
    "hkdv": "unknown selector 'hkdv'; choose one of hkvd, gradual, query_guided, ",
    "": "unknown selector ''",
    "HKVD": "unknown selector 'HKVD'",
    "hkvd:": "'' is not KEY=VALUE; it takes check_layer, ",
    "hkvd:lead=": "lead: '' is not a whole number from 0 to 1,000,000",
    "hkvd:check_layer=auto": "check_layer: 'auto' is not a whole number",
    "hkvd:lead=1,lead=2": "lead is given twice",
    "hkvd:led=2": "hkvd has no parameter 'led'; choose among check_layer, of, lead",
    "hkvd:name=x": "no parameter 'name'",
    "query_guided:layers=3,7": "'7' is not KEY=VALUE; layers are joined by +",
    "query_guided:layers=0-9999999999": "choose all, middle, upper, or layers such as 4-9 or 3+7+12-15",
    "query_guided:layers=٣": "choose all, middle, upper",
    "mixed:of=\x1b[2J": "choose one of v, k, kv",
    "all:k=3": "all takes no parameters",
    "first_k:k=" + "9" * 5000: "k: '999",
}


@pytest.mark.parametrize("spec", REFUSED, ids=lambda spec: spec[:30])
def test_what_cannot_be_read_says_what_could(spec):
    with pytest.raises(ConfigError) as caught:
        make_selector(spec)
    assert REFUSED[spec] in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("kind", SELECTORS.values(), ids=SELECTORS)
def test_every_parameter_is_explained_and_checked(kind):
    """What a parameter means and may be; a value of another kind is refused by the constructor itself."""
    for field in fields(kind) if parameters(kind) else ():  # type: ignore[arg-type]
        assert MEANINGS[field.name]
        assert allowed(kind, field.name)
        with pytest.raises(ConfigError, match=field.name):
            kind(**{field.name: [field.name]})
        with pytest.raises(AttributeError):
            setattr(kind(), field.name, field.default)


def test_a_configuration_with_a_selector_needs_no_torch():
    code = (
        "import sys, blend.config; from blend.select import QueryGuided; "
        "c = blend.config.BlendConfig('mixed:of=kv'); blend.config.BlendConfig(QueryGuided(lead=8)); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
