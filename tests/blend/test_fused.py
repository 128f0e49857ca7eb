"""Kernels in place of a model's small modules: only where they compute the same, and only while a pass runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import IN_BOTH_DTYPES, LAYERS, decoder
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import blend.model.fused as fused
from blend.model.cache import Run
from blend.model.decoder import Decoder
from blend.model.fused import FusedModules
from blend.model.passes import RowRequest

IDS = torch.arange(3, 40)[None]
# Norms and gated MLPs within a layer, as the families have them.
REPLACED = {
    "llama": 2 + 1,
    "qwen3": 4 + 1,
    "gemma2": 4,
    "gemma3": 6,
    "olmo2": 4 + 1,
    "gpt-oss": 2,
    "cohere": 1,
    "phi": 0,
}


def logits(dec: Decoder) -> torch.Tensor:
    count = IDS.shape[1]
    request = RowRequest(IDS, Run.consecutive(0, count, IDS.device), dec.new_cache(count), outputs=count)
    return dec.prefill([request])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in REPLACED), ("gemma2", torch.bfloat16), ("llama", torch.float16)],
)
def test_modules_are_known_by_what_they_compute(name, dtype):
    assert FusedModules.of(decoder(name, dtype).layers).count == LAYERS * REPLACED[name]


@pytest.mark.parametrize(("name", "dtype"), IN_BOTH_DTYPES)
def test_passes_are_the_same(name, dtype):
    plain, dec = decoder(name, dtype), Decoder(decoder(name, dtype).model)
    dec.fused = FusedModules.of(dec.layers)
    ours, theirs = logits(dec).float(), logits(plain).float()
    assert float((ours - theirs).norm() / theirs.norm()) < (1e-5 if dtype == torch.float32 else 0.03)


def test_a_pass_uses_them_and_leaves_the_model(monkeypatch):
    dec, calls = Decoder(decoder("llama").model), list[str]()
    dec.fused = FusedModules.of(dec.layers)
    for name in ("rms_norm", "silu_mul"):
        op = getattr(fused, name)

        def counted(*args: Any, op: Callable[..., Any] = op, name: str = name, **options: Any) -> Any:
            calls.append(name)
            return op(*args, **options)

        monkeypatch.setattr(fused, name, counted)
    logits(dec)
    assert (calls.count("rms_norm"), calls.count("silu_mul")) == (2 * LAYERS, LAYERS)
    assert not [module for module in dec.model.modules() if "forward" in vars(module)]
    calls.clear()
    dec.model(IDS)
    assert not calls


def test_a_forward_that_somebody_replaced_stays(monkeypatch):
    dec, seen = Decoder(decoder("llama").model), list[torch.Tensor]()
    dec.fused = FusedModules.of(dec.layers)
    mlp = dec.layers[0].mlp
    own = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: seen.append(x) or own(x))
    replaced = mlp.forward
    logits(dec)
    assert len(seen) == 1
    assert mlp.forward is replaced


class Subtracting(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Clamping(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1)) * self.up_proj(x))


class Scaling(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


class AddingEarly(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + 1e-3)).to(x.dtype)


def config() -> Any:
    return decoder("llama").model.config


OTHERS = {
    "subtracts the mean": lambda: Subtracting(64),
    "another epsilon": lambda: AddingEarly(64),
    "layer norm": lambda: nn.LayerNorm(64, bias=False),
    "clamps": lambda: Clamping(config()),
    "scales": lambda: Scaling(config()),
    "takes two": lambda: nn.Bilinear(4, 4, 4),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_computes_something_else_stays(make):
    torch.manual_seed(0)
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    assert FusedModules.of(nn.ModuleList([module])).count == 0


def test_other_arguments_go_to_the_module_itself():
    class Gated(LlamaRMSNorm):
        def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) if gate is None else super().forward(x) * gate

    module, x = Gated(64), torch.randn(3, 64)
    expected = [module(x), module(x, x), module(x, gate=x), module(x.double())]
    replaced = FusedModules.of(nn.ModuleList([module]))
    assert replaced.count == 1
    with replaced.installed():
        results = [module(x), module(x, x), module(x, gate=x), module(x.double())]
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other)


@pytest.mark.parametrize(("op", "words"), [("rms_norm", "RMSNorm"), ("silu_mul", "the gated activation")])
def test_a_kernel_that_is_wrong_here_is_an_error(op, words, monkeypatch):
    right = getattr(fused, op)

    def wrong(*args: Any, backend: str | None = None, **options: Any) -> torch.Tensor:
        return right(*args, backend=backend, **options) * (1.0 if backend == "torch" else 1.01)

    monkeypatch.setattr(fused, op, wrong)
    with pytest.raises(RuntimeError, match=f"the kernel of {words} differs from plain torch"):
        FusedModules.of(decoder("llama").layers)
