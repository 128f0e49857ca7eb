"""Methods in turns on a record: their names, repeats, and the floor."""

from dataclasses import replace

import pytest

from blend import BlendConfig, Rag
from blend.eval.dataset import Record, RecordChunk
from blend.eval.evaluator import Evaluator, floor_seconds, standard_methods
from tests.tiny_model import save_tiny_model

TEXT = "the harbour has nine gates and the market has two bells " * 50
LONG = "The market of the town has two old bells and a gate of iron."


def named(*arguments):
    methods = standard_methods(BlendConfig(ratio=0.3), *arguments)
    assert [method.name for method in methods[:2]] == ["full", "reuse"]
    return {method.name: (method.config.selector, method.config.ratio) for method in methods[2:]}


def test_several_ways_to_blend_are_named_by_what_differs():
    assert named() == {"blend": ("query_guided", 0.3)}
    assert named(("hkvd",), (0.1,)) == {"blend": ("hkvd", 0.1)}
    assert named(("hkvd", "query_guided", "hkvd"), (0.1,)) == {
        "hkvd": ("hkvd", 0.1),
        "query_guided": ("query_guided", 0.1),
    }
    assert named(("hkvd", "random"), (0.05, 0.125)) == {
        "hkvd 5%": ("hkvd", 0.05),
        "hkvd 12.5%": ("hkvd", 0.125),
        "random 5%": ("random", 0.05),
        "random 12.5%": ("random", 0.125),
    }


def test_the_floor_by_hand():
    assert floor_seconds(2.0, 0.4, 4) == pytest.approx(2.1)  # computing hides all but the first layer's load
    assert floor_seconds(0.1, 0.8, 4) == pytest.approx(0.8)  # loading takes longer than computing


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    model = save_tiny_model(folder / "tiny", TEXT)
    return Rag(folder / "store", model=str(model), device="cpu", dtype="float32")


def record(*answers, task="qa"):
    chunks = tuple(RecordChunk(f"Town {place}", f"Town {place} has {place} gates. " * 5) for place in range(3))
    return Record("q1", "How many gates has town 2?", answers, chunks, task)


def test_times_are_medians_of_repeats_and_only_the_last_prefill_answers(rag, monkeypatch):
    prefill = rag.blender.prefill
    calls = []

    def timed(layout, *, config=None, room=256, watch=None):  # type: ignore[no-untyped-def]
        calls.append(config.selector)
        repeat = (len(calls) + 1) // 2
        times = {"load": float(repeat), "select": 10.0 * repeat} if repeat > 1 else {"load": 1.0}
        blend = prefill(layout, config=config, room=room, watch=watch)
        return replace(blend, ttft_s=(3.0, 9.0, 1.0)[repeat - 1], stages=times)

    monkeypatch.setattr(rag.blender, "prefill", timed)
    evaluator = Evaluator(rag.blender, rag.template, max_new_tokens=3, repeats=3)
    full, reuse, blend = evaluator.measure(record("2"), standard_methods(BlendConfig(correction=False)))
    assert calls == ["none", "query_guided"] * 3  # in turns
    assert (reuse.ttft_s, blend.ttft_s) == (3.0, 3.0)
    assert blend.stages == {"load": 2.0, "select": 20.0}
    assert full.floor_s is None
    assert full.kl == 0
    assert 0 < reuse.floor_s < blend.floor_s
    assert (blend.question, blend.gold) == ("How many gates has town 2?", ("2",))


def test_rouge_is_taken_where_answers_are_long(rag):
    evaluator = Evaluator(rag.blender, rag.template, max_new_tokens=3)
    methods = standard_methods(BlendConfig())
    for measured in evaluator.measure(record(LONG), methods):
        assert 0 <= measured.rouge_l <= 1
        assert measured.em == 0
    assert {measured.rouge_l for measured in evaluator.measure(record("2"), methods)} == {None}
    assert None not in {measured.rouge_l for measured in evaluator.measure(record("2", task="summary"), methods)}
    assert {measured.em for measured in evaluator.measure(record(), methods)} == {None}
