"""The host is left as found: attention, hooks and outputs of the model, after success, failure and Ctrl-C, in every thread."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blends import filled
from cases import SELECTORS, make_layout
from models import CORE, HYBRIDS, LAYERS, build, tokenizer

from blend.config import BlendConfig
from blend.errors import PromptError, UnsupportedModelError
from blend.model.cache import Run
from blend.model.decoder import Decoder
from blend.model.generate import generate
from blend.model.passes import RowRequest
from blend.prefill.blender import Blender

LAYOUT = make_layout()
IDS = torch.tensor([LAYOUT.token_ids])


def _hooks(model: torch.nn.Module) -> list[Any]:
    names = [f"_forward_{kind}" for kind in ("pre_hooks", "hooks", "pre_hooks_with_kwargs", "hooks_with_kwargs")]
    return [hook for module in model.modules() for name in names for hook in getattr(module, name)]


def _state(model: Any) -> tuple[Any, ...]:
    """What a forward pass could leave behind."""
    overridden = [name for module in model.modules() for name in vars(module) if name in ("forward", "__call__")]
    return (model.config._attn_implementation, model.training, _hooks(model), overridden)


ACTIONS: dict[str, Callable[[Blender], object]] = {
    "prefill": lambda blender: blender.prefill(LAYOUT),
    "prefill with narrowing on the way": lambda blender: blender.prefill(LAYOUT, config=SELECTORS["mixed"]),
    "prefill after asking the query": lambda blender: blender.prefill(LAYOUT, config=SELECTORS["query_guided"]),
    "encode": lambda blender: list(blender.encoder(LAYOUT.prefix).encode(LAYOUT.chunks)),
    "generate": lambda blender: generate(blender.decoder, blender.prefill(LAYOUT), LAYOUT.token_ids, max_new_tokens=3),
    "admission": lambda blender: Decoder(blender.decoder.model, tokenizer()),
}


@pytest.mark.parametrize(
    ("name", "attention", "action"),
    [
        *(("llama", "sdpa", action) for action in ACTIONS),
        *((name, "eager", "prefill with narrowing on the way") for name in CORE),
        *((name, "sdpa", "generate") for name in CORE if name != "llama"),
    ],
)
def test_a_model_is_left_as_found(name, attention, action):
    model = build(CORE[name], attn_implementation=attention)
    before, logits = _state(model), model(IDS).logits
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    ACTIONS[action](filled(Decoder(model, tokenizer(), name), LAYOUT, SELECTORS["hkvd"]))
    assert _state(model) == before
    assert model.config._attn_implementation == attention
    assert torch.equal(model(IDS).logits, logits)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("error", "layer"), [(RuntimeError("broken"), LAYERS - 2), (KeyboardInterrupt(), 0)], ids=["error", "interrupt"]
)
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_a_failure_in_the_middle_is_raised_and_leaves_the_model_as_found(action, error, layer):
    model = build(CORE["llama"])
    blender = filled(Decoder(model, tokenizer(), "llama"), LAYOUT, SELECTORS["hkvd"])
    before, logits, expected = _state(model), model(IDS).logits, blender.prefill(LAYOUT).logits

    def fail(*args: Any) -> None:
        raise error

    broken = model.model.layers[layer].mlp.register_forward_hook(fail)
    with broken, pytest.raises((type(error), UnsupportedModelError)):
        action(blender)
    assert _state(model) == before
    assert torch.equal(model(IDS).logits, logits)
    assert torch.equal(blender.prefill(LAYOUT).logits, expected)


def test_recurrent_layers_keep_no_hooks():
    given = Decoder(build(HYBRIDS["bamba"]), tokenizer(), "bamba")
    before = _state(given.model)
    assert filled(given, LAYOUT, BlendConfig(ratio=0.7)).prefill(LAYOUT).logits.isfinite().all()
    assert _state(given.model) == before
    rows = torch.tensor([0, 3])
    with pytest.raises(PromptError, match="no state in front of row 3"):
        given.prefill([RowRequest(IDS[:, rows], Run.read(rows), given.new_cache(4))])
    assert _state(given.model) == before
