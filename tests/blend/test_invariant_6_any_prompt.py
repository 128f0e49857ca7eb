"""Invariant 6: order, duplicates, any mix of hits and misses, no chunks, tiny and long chunks: an answer or a clear error."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
from blends import assert_dense_blend, empty_blender, filled
from cases import SELECTORS, assert_same_blend, blended, make_layout, recorded
from dense_reference import assert_close, dense_prefill
from models import WINDOW, decoder, eager_model

from blend.errors import ConfigError, PromptError
from blend.layout import Place, PromptLayout
from blend.model.decoder import full_prefill
from blend.model.generate import generate


class Prompt(NamedTuple):
    """Lengths of chunks; their order in the prompt, with repetitions; which chunks of the prompt are stored."""

    chunks: Sequence[int]
    order: Sequence[int] | None = None
    cached: Sequence[int] | None = None
    suffix: int = 7
    prefix: int = 5

    @property
    def layout(self) -> PromptLayout:
        layout = make_layout(self.prefix, self.chunks, self.suffix)
        order = range(len(self.chunks)) if self.order is None else self.order
        return replace(layout, places=tuple(layout.places[i] for i in order))


PROMPTS = {
    "no chunks": Prompt(()),
    "one chunk": Prompt((9,)),
    "one chunk, not cached": Prompt((9,), cached=()),
    "one token": Prompt((1,)),
    "one-token chunks": Prompt((1, 1, 1)),
    "one-token chunks, one cached": Prompt((1, 1, 1), cached=(1,)),
    "two neighbours": Prompt((6, 6)),
    "the same chunk twice": Prompt((9, 5), order=(0, 1, 0)),
    "the same chunk twice in a row": Prompt((9,), order=(0, 0)),
    "the same chunk twice, not cached": Prompt((9, 5), order=(0, 1, 0), cached=(1,)),
    "reversed": Prompt((9, 5, 12), order=(2, 1, 0)),
    "chunks as long as the window": Prompt((WINDOW, WINDOW)),
    "chunks longer than the window": Prompt((3 * WINDOW, 2 * WINDOW + 1), cached=(0,)),
    "a chunk longer than everything else": Prompt((2, 60, 1)),
    "nothing cached": Prompt((9, 5, 12), cached=()),
    "the first cached": Prompt((9, 5, 12), cached=(0,)),
    "the last cached": Prompt((9, 5, 12), cached=(2,)),
    "a question of one token": Prompt((9, 5), suffix=1),
    "a prefix of one token": Prompt((9, 5), prefix=1),
    "a question longer than the window": Prompt((9, 5), suffix=3 * WINDOW),
}
CONFIGS = {name: SELECTORS[name] for name in ("hkvd", "first_k", "mixed", "none")}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize(("name", "selector"), [("llama", "hkvd"), *(("mistral", selector) for selector in CONFIGS)])
def test_invariant_6_every_prompt(name, selector, prompt):
    layout, config = prompt.layout, CONFIGS[selector]
    prefill = recorded(decoder(name), layout, config, cached=prompt.cached)
    stored = {layout.chunks[i] for i in (range(len(layout.chunks)) if prompt.cached is None else prompt.cached)}
    assert prefill.blend.hits == tuple(chunk in stored for chunk in layout.chunks)
    assert_dense_blend(eager_model(name), prefill)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_invariant_6_the_same_prompt_twice_gives_the_same_bits(config):
    """Nothing stored is written to: a key rotated in place would be rotated again by the second prefill."""
    layout = make_layout()
    blender = filled(decoder("llama"), layout, config)
    assert_same_blend(blender.prefill(layout), blender.prefill(layout))


def test_a_prompt_longer_than_the_context_is_refused():
    longest = make_layout(chunks=(500,))
    assert longest.rows == 512
    blender = empty_blender()
    blender.prefill(longest)
    with pytest.raises(PromptError, match=r"513 tokens but .* at most 512; use fewer or smaller chunks"):
        blender.prefill(make_layout(chunks=(501,)))


DEGENERATE = {
    "no suffix": PromptLayout.of_chunks((3, 4), ((5, 6, 7), (8, 9)), ()),
    "a prefix only": PromptLayout.of_chunks((3, 4), (), ()),
    "no prefix": PromptLayout.of_chunks((), ((5, 6, 7), (8, 9)), (10, 11)),
    "nothing": PromptLayout.of_chunks((), (), ()),
}


@pytest.mark.parametrize("layout", DEGENERATE.values(), ids=DEGENERATE)
def test_invariant_6_a_prompt_without_prefix_or_suffix_is_refused(layout):
    """Without a suffix the last row may be a stored one that no selector chooses: there would be nothing to predict from."""
    with pytest.raises(PromptError, match=r"prefix|suffix"):
        blended(decoder("llama"), layout, CONFIGS["hkvd"])


def test_invariant_6_an_empty_chunk_is_as_if_it_were_not_there():
    layout = PromptLayout.of_chunks((3, 4), ((5, 6, 7), ()), (10, 11))
    blend = empty_blender(config=CONFIGS["hkvd"]).prefill(layout)
    assert_close(blend.logits[0], dense_prefill(eager_model("llama"), layout.token_ids).logits[-1])


@pytest.mark.parametrize("wrong", [-1, 96, 10**6])
@pytest.mark.parametrize("where", ["prefix", "chunk", "suffix"])
def test_a_token_that_the_model_does_not_have_is_refused(wrong, where):
    """A GPU that is asked for one computes nothing any more, for nobody."""
    layout = make_layout()
    odd = {
        "prefix": replace(layout, prefix=(*layout.prefix, wrong)),
        "chunk": replace(layout, places=(*layout.places, Place((5, wrong)))),
        "suffix": replace(layout, suffix=(wrong, 5)),
    }[where]
    for prefill in (empty_blender().prefill, partial(full_prefill, decoder("llama"))):
        with pytest.raises(PromptError, match=f"token id {wrong}; the model has those from 0 to 95"):
            prefill(odd)


@pytest.mark.parametrize("tokens", [0, -4, 2.5, True])
def test_a_length_of_an_answer_that_is_none_is_refused(tokens):
    blend = full_prefill(decoder("llama"), make_layout())
    with pytest.raises(ConfigError, match=f"max_new_tokens: {tokens} is not a whole number from 1"):
        generate(decoder("llama"), blend, make_layout().token_ids, max_new_tokens=tokens)
