"""Many prompts at once through the embedded engine: each gets what it gets alone."""

from dataclasses import replace

import pytest
import torch
from cases import cache_chunks, make_layout
from engines import FEW, Answer, MakeEngine, alone, ask, layouts
from models import decoder

from blend.model.decoder import full_prefill
from blend.model.generate import generate
from blend.sampling import Sampling
from blend.serve.events import Finished
from blend.serve.prompt import Prompt
from blend.types import PromptLayout


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3n", "gemma4"])
def test_each_gets_what_it_gets_alone(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(name, most_running=5, pass_rows=25)
    blender, prompts = engine.blender, layouts(9)
    for layout in prompts[:6]:
        cache_chunks(blender, layout)
    expected = [alone(blender, layout) for layout in prompts]
    answers = [ask(engine, layout) for layout in prompts]
    for answer, tokens, layout in zip(answers, expected, prompts, strict=True):
        assert answer.wait().tokens == tokens
        assert answer.last == Finished("length" if len(tokens) == FEW.max_tokens else "stop")
        assert answer.figures.rows == layout.rows
    assert answers[0].started.hits == (True,) * len(prompts[0].chunks)
    assert answers[0].figures.rows_computed < prompts[0].rows / 2
    engine.close(finish_s=60)
    assert engine.stats()[:2] == (0, 0)


def test_an_answer_goes_on_while_another_prompt_is_prefilled(make_engine: MakeEngine) -> None:
    engine = make_engine(most_running=2, pass_rows=10)
    order: list[str] = []
    short, long = Answer(lambda: order.append("short")), Answer(lambda: order.append("long"))
    engine.submit(Prompt.of(layouts(1)[0], sampling=Sampling(max_tokens=60)), short)
    short.begun()
    engine.submit(Prompt.of(layouts(2)[1], sampling=FEW), long)
    begun = len(order)
    long.wait()
    assert order[begun:].index("long") >= 5, "its rows take more than five passes, each with a token of the other"
    assert short.wait().tokens == alone(engine.blender, layouts(1)[0], Sampling(max_tokens=60))


def test_what_the_store_lacks_is_computed_though_prompts_always_wait(make_engine: MakeEngine) -> None:
    """Or a busy server would compute it anew in every prompt, and be the busier for it."""
    engine = make_engine(most_running=2, pass_rows=12)
    others = [layout.all_plain() for layout in layouts(3)]
    layout = layouts(1)[0]
    library = engine.blender.library(layout.prefix)
    lacking = library.missing(layout.chunks[:1])
    assert lacking
    asked = [ask(engine, layout) for layout in others * 8]
    left_when_stored: list[int] = []

    def on_done(one: object, error: Exception | None) -> None:
        assert error is None
        left_when_stored.append(sum(not one.done.is_set() for one in asked))

    engine.encode(library, lacking, on_done)
    for one in asked:
        one.wait()
    assert len(left_when_stored) == len(lacking)
    assert min(left_when_stored) > len(asked) // 3
    assert not library.missing(layout.chunks[:1])


def test_a_prompt_without_chunks_is_prefilled_in_full(make_engine: MakeEngine) -> None:
    engine, ids = make_engine(), make_layout().token_ids
    layout = PromptLayout.of_chunks(ids[:1], (), ids[1:])
    answer = ask(engine, layout).wait()
    full = full_prefill(engine.decoder, layout)
    assert answer.tokens == list(generate(engine.decoder, full, ids, max_new_tokens=6).token_ids)
    assert answer.figures.rows_computed == layout.rows - 1


def test_log_probabilities_are_those_of_the_blend(make_engine: MakeEngine) -> None:
    engine, layout = make_engine(), make_layout()
    cache_chunks(engine.blender, layout)
    told = ask(engine, layout, Sampling(max_tokens=1, logprobs=3)).wait().first
    expected = engine.blender.prefill(layout).logits[0].log_softmax(-1)
    assert torch.allclose(torch.tensor([one.logprob for one in told.top]), expected.topk(3).values, atol=1e-4)
    assert told.logprob == pytest.approx(float(expected[told.id]), abs=1e-4)


@pytest.mark.parametrize(
    "given", [*({"temperature": one} for one in (1e-40, 1e-30, 1e-6, 1.1e-5)), {"temperature": 1.5, "top_p": 0.0}]
)
def test_next_to_no_choice_is_greedy(given: dict[str, float], make_engine: MakeEngine) -> None:
    engine, layout = make_engine(), make_layout()
    cache_chunks(engine.blender, layout)
    cold = ask(engine, layout, replace(FEW, seed=1, **given)).wait()
    assert cold.tokens == ask(engine, layout).wait().tokens


def test_an_answer_goes_on_behind_its_end_where_that_is_wanted(make_engine: MakeEngine) -> None:
    engine, layout = make_engine(), make_layout()
    config = decoder("llama").model.generation_config
    before, config.eos_token_id = config.eos_token_id, list(range(97))
    try:
        assert len(ask(engine, layout).wait().tokens) == 1
        assert len(ask(engine, layout, replace(FEW, ignore_eos=True)).wait().tokens) == FEW.max_tokens
    finally:
        config.eos_token_id = before
