"""The host is left as found: attention, hooks and outputs of the model, after success, failure and Ctrl-C, in every thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from cases import SELECTORS, cache_chunks, make_layout
from models import CORE, HYBRIDS, LAYERS, build, tokenizer

from blend.config import BlendConfig
from blend.errors import PromptError
from blend.model.cache import Run
from blend.model.decoder import Decoder
from blend.model.generate import generate
from blend.model.passes import RowRequest
from blend.prefill.blender import Blender
from blend.store import open_store

LAYOUT = make_layout()
IDS = torch.tensor([LAYOUT.token_ids])


def _blender(dec: Decoder, config: BlendConfig | None = None) -> Blender:
    return cache_chunks(Blender(dec, open_store("memory:"), config or SELECTORS["hkvd"]), LAYOUT)


def _hooks(model: torch.nn.Module) -> list[Any]:
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [hook for module in model.modules() for name in names for hook in getattr(module, name)]


def _state(model: Any) -> tuple[Any, ...]:
    """What a forward pass could leave behind."""
    overridden = [name for module in model.modules() for name in vars(module) if name in ("forward", "__call__")]
    return (model.config._attn_implementation, model.training, _hooks(model), overridden)


@contextmanager
def _fails_in_layer(model: Any, layer: int, error: BaseException) -> Iterator[None]:
    original = model.model.layers[layer].mlp.forward

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    model.model.layers[layer].mlp.forward = fail
    try:
        yield
    finally:
        del model.model.layers[layer].mlp.forward
        assert model.model.layers[layer].mlp.forward == original


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
    ACTIONS[action](_blender(Decoder(model, tokenizer(), name)))
    assert _state(model) == before
    assert model.config._attn_implementation == attention
    assert torch.equal(model(IDS).logits, logits)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("error", "layer"), [(RuntimeError("broken"), LAYERS - 2), (KeyboardInterrupt(), 0)], ids=["error", "interrupt"]
)
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_a_failure_in_the_middle_leaves_the_model_as_found(action, error, layer):
    model = build(CORE["llama"])
    blender = _blender(Decoder(model, tokenizer(), "llama"))
    before, logits, expected = _state(model), model(IDS).logits, blender.prefill(LAYOUT).logits
    with _fails_in_layer(model, layer, error), suppress(type(error), Exception):
        action(blender)
    assert _state(model) == before
    assert torch.equal(model(IDS).logits, logits)
    assert torch.equal(blender.prefill(LAYOUT).logits, expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_in_the_middle_is_not_swallowed(error):
    model = build(CORE["llama"])
    blender = _blender(Decoder(model, tokenizer(), "llama"))
    with _fails_in_layer(model, 1, error()), pytest.raises(error):
        blender.prefill(LAYOUT)


def test_recurrent_layers_keep_no_hooks():
    given = Decoder(build(HYBRIDS["bamba"]), tokenizer(), "bamba")
    before = _state(given.model)
    assert _blender(given, BlendConfig(ratio=0.7)).prefill(LAYOUT).logits.isfinite().all()
    assert _state(given.model) == before
    rows = torch.tensor([0, 3])
    with pytest.raises(PromptError, match="no state in front of row 3"):
        given.prefill([RowRequest(IDS[:, rows], Run.read(rows), given.new_cache(4))])
    assert _state(given.model) == before
