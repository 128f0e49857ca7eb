"""What kvblend uses of transformers and torch beyond their promises: guarded, with a fallback or one clear line.

How threads of ours compute alone is in `test_threads`, packed weights in `test_packed`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import SELECTORS, cache_chunks, make_layout
from models import CORE, LAYERS, build, decoder, tokenizer

from blend.errors import UnsupportedModelError
from blend.model.decoder import Decoder
from blend.model.generate import SUPPORTED, generate, logits_processors
from blend.prefill.blender import Blend, Blender
from blend.sampling import Sampling
from blend.store import open_store

LAYOUT = make_layout()


def _prefilled(dec: Decoder, selector: str) -> Blend:
    blender = cache_chunks(Blender(dec, open_store("memory:"), SELECTORS[selector]), LAYOUT)
    return blender.prefill(LAYOUT)


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
    with pytest.raises(UnsupportedModelError, match="cannot be driven") as caught:
        Decoder(model, tokenizer(), "llama")
    assert transformers.__version__ in str(caught.value)
    assert "Stubborn" in str(caught.value)
    assert "\n" not in str(caught.value)


class _Hooks:
    """A user's hooks on every layer: how many rows each saw, and a vector added to what goes in."""

    def __init__(self, model: Any) -> None:
        self.before: list[list[set[int]]] = [[] for _ in range(LAYERS)]
        self.after: list[list[int]] = [[] for _ in range(LAYERS)]
        steer = torch.linspace(-0.5, 0.5, model.config.hidden_size)
        for index, layer in enumerate(model.model.layers):

            def into(module: Any, args: Any, kwargs: Any, index: int = index) -> Any:
                cos, sin = kwargs["position_embeddings"]
                self.before[index].append({args[0].shape[1], cos.shape[1], sin.shape[1]})
                return (args[0] + steer, *args[1:]), kwargs

            def out_of(module: Any, args: Any, output: Any, index: int = index) -> None:
                self.after[index].append((output[0] if isinstance(output, tuple) else output).shape[1])

            layer.register_forward_pre_hook(into, with_kwargs=True)
            layer.register_forward_hook(out_of)


def test_a_users_hooks_on_layers_run_once_a_pass_on_rows_that_fit_together():
    """And what they change is what the selector and the recomputed rows see."""
    model = build(CORE["llama"])
    dec = Decoder(model, tokenizer(), "llama")
    plain = _prefilled(dec, "hkvd").logits
    hooks = _Hooks(model)
    blender = cache_chunks(Blender(dec, open_store("memory:"), SELECTORS["hkvd"]), LAYOUT)
    for seen in (*hooks.before, *hooks.after):
        seen.clear()
    blend = blender.prefill(LAYOUT)
    assert [len(seen) for seen in hooks.before] == [1] * LAYERS
    assert [len(seen) for seen in hooks.after] == [1] * LAYERS
    assert all(len(rows) == 1 for seen in hooks.before for rows in seen), hooks.before
    kept = blend.rows_recomputed
    assert [seen[0] for seen in hooks.after[1:-1]] == [kept] * (LAYERS - 2)
    assert hooks.after[-1] == [1]
    assert [rows for (rows,) in hooks.before[2:]] == [{kept}] * (LAYERS - 2)
    assert not torch.allclose(blend.logits, plain)


def _hands_over_nothing(self: Any, inputs: Any, custom_generate: Any = None, **options: Any) -> Any:
    return custom_generate(self, inputs)


def _takes_no_loop(self: Any, inputs: Any, **options: Any) -> Any:
    raise AssertionError("was not to be called")


@pytest.mark.parametrize("changed", [_hands_over_nothing, _takes_no_loop])
def test_a_generate_that_changed_is_one_clear_line(monkeypatch, changed):
    dec = decoder("llama")
    blend = _prefilled(dec, "none")
    monkeypatch.setattr(transformers.GenerationMixin, "generate", changed)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'transformers") as caught:
        generate(dec, blend, LAYOUT.token_ids)
    assert transformers.__version__ in str(caught.value)
    assert "\n" not in str(caught.value)


def test_processors_that_are_made_elsewhere_are_one_clear_line(monkeypatch):
    monkeypatch.delattr(transformers.GenerationMixin, "_get_logits_processor")
    with pytest.raises(UnsupportedModelError, match=r"pip install 'transformers"):
        logits_processors(decoder("llama"), Sampling(), torch.tensor([LAYOUT.token_ids]))


def test_the_versions_it_names_are_those_that_the_distribution_requires():
    assert f'"transformers{SUPPORTED}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
