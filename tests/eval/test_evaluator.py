"""Methods in turns on a record: their names, repeats, and the floor."""

from dataclasses import replace

import pytest
from models import decoder

from blend import BlendConfig
from blend.eval import evaluator as evaluating
from blend.eval.dataset import Record, RecordChunk
from blend.eval.evaluator import Evaluator, floor_seconds, standard_methods
from blend.prefill.blender import Blender
from blend.store import open_store
from tests.layouts import template_of


def named(*arguments):
    methods = standard_methods(BlendConfig(ratio=0.3), *arguments)
    assert [method.name for method in methods[:2]] == ["full", "reuse"]
    return {method.name: (method.config.selector, method.config.ratio) for method in methods[2:]}


def test_several_ways_to_blend_are_named_by_what_differs():
    assert named() == {"blend": ("query_guided", 0.3)}
    assert named(("hkvd",), (0.1,)) == {"blend": ("hkvd", 0.1)}
    assert named(("hkvd", "query_guided", "hkvd"), (0.1,)) == {"hkvd": ("hkvd", 0.1), "query_guided": ("query_guided", 0.1)}
    assert named(("hkvd", "random"), (0.05, 0.125)) == {
        "hkvd 5%": ("hkvd", 0.05),
        "hkvd 12.5%": ("hkvd", 0.125),
        "random 5%": ("random", 0.05),
        "random 12.5%": ("random", 0.125),
    }


def test_the_floor_by_hand():
    assert floor_seconds(2.0, 0.4, 4) == pytest.approx(2.1)  # computing hides all but the first layer's load
    assert floor_seconds(0.1, 0.8, 4) == pytest.approx(0.8)  # loading takes longer than computing
