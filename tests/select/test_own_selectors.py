"""Selectors of users' own: through Blender, Rag and Evaluator, held to the contract."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import assert_same_blend, blended, make_layout
from models import decoder

from blend import BlendConfig, Evidence, Needs, Selector
from blend.errors import ConfigError
from blend.prefill.blender import Blend
from tests.blend.blends import refused

LAYOUT = make_layout()
GUIDE = Path(__file__).parents[2] / "docs" / "python.md"


@dataclass(frozen=True)
class Returning(Selector):
    """Returns what it is told to, out of the candidates and the budget; not written for anybody's use."""

    answer: Callable[[torch.Tensor, int], Any]
    check_layer: int = 0

    def needs(self, layers: int) -> Needs:
        return Needs(self.check_layer)

    def select(self, evidence: Evidence) -> Any:
        return self.answer(evidence.candidates, evidence.budget)


def _prefill(answer: Callable[[torch.Tensor, int], Any], check_layer: int = 0) -> Blend:
    return blended(decoder("llama"), LAYOUT, BlendConfig(Returning(answer, check_layer), ratio=0.3))


def _spoil(rows: torch.Tensor, budget: int) -> torch.Tensor:
    """Write into what was shown, and return that."""
    rows += 1000
    return rows[:budget]


BROKEN: dict[str, tuple[Callable[[torch.Tensor, int], Any], str]] = {
    "no candidates": (lambda rows, n: rows[:n] - rows[0], "row 0, which is no candidate; return rows of"),
    "negative": (lambda rows, n: -rows[:n], "which is no candidate"),
    "spoiled evidence": (_spoil, "which is no candidate"),
    "twice": (lambda rows, n: rows[[3, 1, 3]], "row 28 twice"),
    "too many": (lambda rows, n: rows[: n + 1], "15 rows where the budget is 14"),
    "of int32": (lambda rows, n: rows[:n].int(), "a tensor of int32 [14]; return int64 positions"),
    "a mask": (lambda rows, n: rows > 30, "a tensor of bool [26]"),
    "a matrix": (lambda rows, n: rows[:n][None], "a tensor of int64 [1, 14]"),
    "a list": (lambda rows, n: rows[:n].tolist(), "it returned [25, 26"),
    "nothing": (lambda rows, n: None, "it returned None"),
}


@pytest.mark.parametrize("check_layer", [0, 2])
@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_the_contract_ends_in_one_line(case, check_layer):
    answer, told = BROKEN[case]
    spec = "Returning:check_layer=2" if check_layer else "Returning"
    with refused(ConfigError, rf"^selector {spec}: .*{re.escape(told)}"):
        _prefill(answer, check_layer)


@pytest.mark.parametrize("check_layer", [0, 2])
def test_rows_in_any_order_are_the_same_rows(check_layer):
    ascending, descending = (_prefill(a, check_layer) for a in (lambda r, n: r[:n], lambda r, n: r[:n].flip(0)))
    assert_same_blend(ascending, descending)
    assert ascending.selection.rows.tolist() == sorted(ascending.selection.rows.tolist())


def test_a_switch_is_written_in_small_letters():
    @dataclass(frozen=True)
    class Switched(Returning):
        backwards: bool = False

    specs = [Switched(_spoil, backwards=backwards).spec for backwards in (False, True)]
    assert specs == ["Switched", "Switched:backwards=true"]


def test_a_check_layer_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="layer: -1"):
        Needs(-1)


def test_needs_of_another_type_are_refused():
    class Odd(Returning):
        def needs(self, layers: int) -> Any:
            return (0,)

    with pytest.raises(ConfigError, match=r"selector Odd: its needs are .* return a blend\.Needs"):
        blended(decoder("llama"), LAYOUT, BlendConfig(Odd(lambda rows, budget: rows)))


def test_what_is_no_selector_is_refused():
    for wrong in (None, 3, Returning, ["hkvd"]):
        with pytest.raises(ConfigError, match=r"give a name, .* or a blend\.Selector"):
            BlendConfig(selector=wrong)  # type: ignore[arg-type]


def _documented() -> dict[str, Any]:
    """What the block of the guide that defines a selector makes, run as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if "(Selector)" in block)
    found: dict[str, Any] = {"__name__": "guide"}
    exec(compile(block, str(GUIDE), "exec", dont_inherit=True), found)
    return found


def test_the_selector_of_the_guide_through_a_blender():
    config: BlendConfig = _documented()["config"]
    assert config.plain()["selector"] == "EndsOfChunks:rows=12"
    wide = BlendConfig(config.selector, ratio=0.5)
    blend = blended(decoder("llama"), LAYOUT, wide)
    tails = {row for span in LAYOUT.chunk_spans[1:] for row in range(max(span.start, span.stop - 12), span.stop)}
    chosen = set(blend.selection.rows.tolist()) - set(range(LAYOUT.context.stop, LAYOUT.rows))
    assert chosen <= tails
    assert len(chosen) == min(len(tails), round(0.5 * LAYOUT.context.length))
