"""RMSNorm and the gated activation, against modules of transformers and float64."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blend_kernels import rms_norm, silu_mul

NORMS = {
    "llama": (LlamaRMSNorm, {}),
    "gemma": (Gemma2RMSNorm, {"plus_one": True, "rounds_first": False}),
    "gpt-oss": (GptOssRMSNorm, {"rounds_first": False}),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Hidden states, states by heads, odd widths, more rows than a program takes.
SHAPES = [(1, 5, 4, 16), (1, 1, 1), (3, 111), (70, 63), (1, 2, 4097)]
CASES = [
    *((name, (1, 7, 96), dtype) for name in NORMS for dtype in DTYPES),
    *(("llama", shape, torch.bfloat16) for shape in SHAPES),
    *(("gemma", shape, torch.float32) for shape in SHAPES),
]


def assert_rounded_alike(found, expected, backend):
    """Equal up to one rounding, and nearly everywhere exactly; float32 up to the order of its sums."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    kind, error = torch.finfo(found.dtype), (found.float() - expected.float()).abs()
    unit = kind.eps * (expected.float().abs() + kind.smallest_normal)
    if found.dtype == torch.float32:
        assert (error <= 64 * unit).all()
    elif found.dtype == torch.bfloat16 and backend == "triton" and not found.is_cuda:
        assert (error <= 2.1 * unit).all()  # the interpreter cuts bf16 off, twice, where GPUs round to nearest
    else:
        assert (error <= unit).all()
        assert (error > 0).sum() <= 1 + 0.01 * error.numel()


@pytest.mark.parametrize(("name", "shape", "dtype"), CASES, ids=str)
@torch.inference_mode()
def test_norms_are_those_of_the_families(name, shape, dtype, backend, device, poisoned):
    kind, options = NORMS[name]
    module = kind(shape[-1], eps=1e-5).to(device, dtype)
    torch.nn.init.normal_(module.weight, 1, 0.5)
    for size in (1e-3, 1, 30):  # where the epsilon decides, and where it does not matter
        x = (size * (torch.randn(shape, device=device) + 0.3)).to(dtype)
        assert_rounded_alike(rms_norm(x, module.weight, 1e-5, backend=backend, **options), module(x), backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 111), (2049,), (5, 1024), (0, 16)], ids=str)
@torch.inference_mode()
def test_activation_is_that_of_the_modules(shape, dtype, backend, device, poisoned):
    gate, up = (8 * torch.randn(2, *shape, device=device)).to(dtype)
    assert_rounded_alike(silu_mul(gate, up, backend=backend), torch.nn.functional.silu(gate) * up, backend)


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter's exponential
@torch.inference_mode()
def test_activation_of_large_numbers(backend, device):
    gate, up = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4], device=device), torch.full((6,), 2.0, device=device)
    expected = torch.nn.functional.silu(gate.double()) * 2
    torch.testing.assert_close(silu_mul(gate, up, backend=backend).double(), expected, rtol=1e-6, atol=1e-30)


@torch.inference_mode()
def test_any_strides(backend, device):
    whole = torch.randn(6, 2, 48, device=device)
    part, weight = whole.transpose(0, 1)[:, :, :32], torch.randn(32, device=device)
    assert torch.equal(
        rms_norm(part, weight, 1e-6, backend=backend), rms_norm(part.clone(), weight, 1e-6, backend=backend)
    )
    gate, up = whole.chunk(2, -1)
    assert_rounded_alike(
        silu_mul(gate, up, backend=backend), silu_mul(gate.clone(), up.clone(), backend=backend), backend
    )
