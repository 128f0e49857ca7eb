"""A draft of the answer makes it cheaper and never changes it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import cache_chunks
from engines import MakeEngine, ask, layouts

from blend.model.passes import RowRequest
from blend.sampling import Sampling

GREEDY = Sampling(max_tokens=24, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.3, seed=11)
PENALISED = replace(DRAWN, repetition_penalty=1.3, top_p=0.9)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PENALISED])
@pytest.mark.parametrize("right", [0, 1, 7, 23, 24])
def test_the_answer_is_that_without_a_draft(sampling: Sampling, right: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    layout = layouts(1)[0]
    cache_chunks(engine.blender, layout)
    expected = ask(engine, layout, sampling).wait().tokens
    wrong = tuple((token + 1) % engine.decoder.vocabulary for token in expected)
    draft = (*expected[:right], *wrong[right:], 1, 2, 3)
    answer = ask(engine, layout, sampling, draft=draft).wait()
    assert answer.tokens == expected
    # What the draft left in the caches harms no later prompt.
    assert ask(engine, layout, sampling).wait().tokens == expected


def test_a_right_draft_takes_few_passes(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    layout, passes, prefill = layouts(1)[0], list[int](), engine.decoder.prefill
    expected = ask(engine, layout, GREEDY).wait().tokens

    def counted(requests: Sequence[RowRequest], **more: Any) -> torch.Tensor:
        passes.append(sum(request.outputs for request in requests))
        return prefill(requests, **more)

    monkeypatch.setattr(engine.decoder, "prefill", counted)
    assert ask(engine, layout, GREEDY, draft=tuple(expected)).wait().tokens == expected
    with_draft, passes[:] = len(passes), []
    assert ask(engine, layout, GREEDY).wait().tokens == expected
    assert with_draft < 5 < GREEDY.max_tokens <= len(passes) + 1


def test_others_decode_in_the_same_passes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second = layouts(2)
    for layout in (first, second):
        cache_chunks(engine.blender, layout)
    expected = [ask(engine, layout, DRAWN).wait().tokens for layout in (first, second)]
    both = [ask(engine, first, DRAWN, draft=tuple(expected[0][:20])), ask(engine, second, DRAWN)]
    assert [one.wait().tokens for one in both] == expected
