"""Kernels in place of a model's small modules: only where they compute the same, and only while a pass runs."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from blends import consecutive
from models import IN_BOTH_DTYPES, LAYERS, decoder
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import blend.model.fused as fused
from blend.model.decoder import Decoder
from blend.model.fused import FusedModules

IDS = torch.arange(3, 40)[None]
# Norms and gated MLPs within a layer, as the families have them.
REPLACED = {
    "llama": 2 + 1,
    "qwen3": 4 + 1,
    "gemma3": 6,
    "olmo2": 4 + 1,
    "gpt-oss": 2,
    "cohere": 1,
    "phi": 0,
    "gemma2": 4,
}


def logits(dec: Decoder) -> torch.Tensor:
    return dec.prefill([consecutive(IDS, 0, dec.new_cache(37), outputs=37)])


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
    dec = Decoder(decoder("llama").model)
    dec.fused = FusedModules.of(dec.layers)
    ops = [Mock(wraps=getattr(fused, name)) for name in ("rms_norm", "silu_mul")]
    monkeypatch.setattr(fused, "rms_norm", ops[0])
    monkeypatch.setattr(fused, "silu_mul", ops[1])
    logits(dec)
    dec.model(IDS)
    assert [op.call_count for op in ops] == [2 * LAYERS, LAYERS], "those of the pass alone"
    assert not [module for module in dec.model.modules() if "forward" in vars(module)]


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


def subtracting_the_mean(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return LlamaRMSNorm.forward(norm, x - x.mean(-1, keepdim=True))


def adding_epsilon_early(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + 1e-3)).to(x.dtype)


def clamping(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x).clamp(max=1)) * mlp.up_proj(x))


def scaling(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return LlamaMLP.forward(mlp, x) * 0.5


def changed(kind: type[nn.Module], forward: Callable[..., Any], size: Any) -> nn.Module:
    return type("Changed", (kind,), {"forward": forward})(size)


OTHERS = {
    "subtracts the mean": changed(LlamaRMSNorm, subtracting_the_mean, 64),
    "another epsilon": changed(LlamaRMSNorm, adding_epsilon_early, 64),
    "layer norm": nn.LayerNorm(64, bias=False),
    "clamps": changed(LlamaMLP, clamping, LlamaConfig(hidden_size=64, intermediate_size=80)),
    "scales": changed(LlamaMLP, scaling, LlamaConfig(hidden_size=64, intermediate_size=80)),
    "takes two": nn.Bilinear(4, 4, 4),
}


@pytest.mark.parametrize("module", OTHERS.values(), ids=OTHERS)
def test_what_computes_something_else_stays(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    assert FusedModules.of(nn.ModuleList([module])).count == 0


def test_other_arguments_go_to_the_module_itself():
    class Gated(LlamaRMSNorm):
        def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) if gate is None else super().forward(x) * gate

    def results() -> list[torch.Tensor]:
        return [module(x), module(x, x), module(x, gate=x), module(x.double())]

    module, x = Gated(64), torch.randn(3, 64)
    expected, replaced = results(), FusedModules.of(nn.ModuleList([module]))
    assert replaced.count == 1
    with replaced.installed():
        torch.testing.assert_close(results(), expected)


@pytest.mark.parametrize(("op", "words"), [("rms_norm", "RMSNorm"), ("silu_mul", "the gated activation")])
def test_a_kernel_that_is_wrong_here_is_an_error(op, words, monkeypatch):
    right = getattr(fused, op)

    def wrong(*args: Any, backend: str | None = None, **options: Any) -> torch.Tensor:
        return right(*args, backend=backend, **options) * (1.0 if backend == "torch" else 1.01)

    monkeypatch.setattr(fused, op, wrong)
    with pytest.raises(RuntimeError, match=f"the kernel of {words} differs from plain torch"):
        FusedModules.of(decoder("llama").layers)
