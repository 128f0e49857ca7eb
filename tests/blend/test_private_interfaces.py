"""What kvblend uses of transformers and torch beyond their promises: guarded, with a fallback or one clear line.

How threads of ours compute alone is in `test_threads`, packed weights in `test_packed`.
"""

from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers
from blends import filled, refused
from cases import SELECTORS, make_layout
from models import CORE, LAYERS, build, decoder, tokenizer
from places import REPOSITORY

from blend.errors import UnsupportedModelError
from blend.model.decoder import Decoder
from blend.model.generate import SUPPORTED, generate, logits_processors
from blend.sampling import Sampling

LAYOUT = make_layout()


class Stubborn(transformers.LlamaConfig):
    """Says the same attention whatever it is told, as a library might that keeps it elsewhere."""

    @property
    def _attn_implementation(self) -> str:
        return "eager"

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        pass


def test_a_configuration_that_does_not_switch_is_refused_in_one_line():
    model = build(CORE["llama"])
    model.config.__class__ = Stubborn
    with refused(UnsupportedModelError, "cannot be driven") as caught:
        Decoder(model, tokenizer(), "llama")
    assert transformers.__version__ in str(caught.value)
    assert "Stubborn" in str(caught.value)


def test_a_users_hooks_on_layers_run_once_a_pass_on_rows_that_fit_together():
    """And what they change is what the selector and the recomputed rows see."""
    model = build(CORE["llama"])
    dec = Decoder(model, tokenizer(), "llama")
    plain = filled(dec, LAYOUT, SELECTORS["hkvd"]).prefill(LAYOUT)
    steer = torch.linspace(-0.5, 0.5, model.config.hidden_size)
    before, after = defaultdict(list), defaultdict(list)

    def into(layer: Any, args: Any, kwargs: Any) -> Any:
        inputs = (args[0], *kwargs["position_embeddings"])
        before[layer.self_attn.layer_idx].append({tensor.shape[1] for tensor in inputs})
        return (args[0] + steer, *args[1:]), kwargs

    def out_of(layer: Any, args: Any, output: torch.Tensor) -> None:
        after[layer.self_attn.layer_idx].append(output.shape[1])

    for layer in model.model.layers:
        layer.register_forward_pre_hook(into, with_kwargs=True)
        layer.register_forward_hook(out_of)
    blender = filled(dec, LAYOUT, SELECTORS["hkvd"])
    before.clear()
    after.clear()
    blend = blender.prefill(LAYOUT)
    rows = blend.rows_recomputed
    assert [len(sizes) for (sizes,) in before.values()] == [1] * LAYERS, before
    assert [before[layer] for layer in range(2, LAYERS)] == [[{rows}]] * (LAYERS - 2)
    assert [after[layer] for layer in range(1, LAYERS)] == [*[[rows]] * (LAYERS - 2), [1]]
    assert not torch.allclose(blend.logits, plain.logits)


def _hands_over_nothing(self: Any, inputs: Any, custom_generate: Any = None, **options: Any) -> Any:
    return custom_generate(self, inputs)


def _takes_no_loop(self: Any, inputs: Any, **options: Any) -> Any:
    raise AssertionError("was not to be called")


@pytest.mark.parametrize("changed", [_hands_over_nothing, _takes_no_loop])
def test_a_generate_that_changed_is_one_clear_line(monkeypatch, changed):
    blender = filled(decoder("llama"), LAYOUT)
    monkeypatch.setattr(transformers.GenerationMixin, "generate", changed)
    with refused(UnsupportedModelError, r"pip install 'transformers") as caught:
        generate(blender.decoder, blender.prefill(LAYOUT), LAYOUT.token_ids)
    assert transformers.__version__ in str(caught.value)


def test_processors_that_are_made_elsewhere_are_one_clear_line(monkeypatch):
    monkeypatch.delattr(transformers.GenerationMixin, "_get_logits_processor")
    with refused(UnsupportedModelError, r"pip install 'transformers"):
        logits_processors(decoder("llama"), Sampling(), torch.tensor([LAYOUT.token_ids]))


def test_the_versions_it_names_are_those_that_the_distribution_requires():
    assert f'"transformers{SUPPORTED}"' in (REPOSITORY / "pyproject.toml").read_text()
