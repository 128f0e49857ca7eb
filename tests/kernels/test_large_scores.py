"""Half precision with scores far from zero: they are products of fp32 accuracy, so only inputs and outputs are rounded."""

import pytest
import torch

from blend_kernels import attention_mass, selective_attention
from tests.kernels.dense import dense_attention
from tests.kernels.test_selective_attention import make, scattered

HALVES = [torch.bfloat16, torch.float16]
# A unit in the last place of values up to 4, and of the weights; the interpreter cuts bf16 off where GPUs round to nearest.
OUT = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def large(device, dtype, times, **shape):
    q, k, v = make(device, dtype=dtype, **shape)
    return q * times, k * times, v


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("dim", "value_dim", "softcap"), [(128, 128, None), (128, 128, 50.0), (192, 128, None), (48, 80, 9.0)]
)
def test_attention(dtype, dim, value_dim, softcap, backend, device):
    q, k, v = large(device, dtype, 4, dim=dim, value_dim=value_dim)
    positions = scattered(17, 63, device)
    out, lse = selective_attention(q, k, v, positions, softcap=softcap, return_lse=True, backend=backend)
    expected = dense_attention(q, k, v, positions, softcap=softcap)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=OUT[dtype])
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [None, 30])
def test_mass(dtype, window, backend, device):
    q, k, _ = large(device, dtype, 4, dim=128)
    positions = scattered(17, 63, device)
    mass = attention_mass(q, k, positions, window=window, backend=backend)
    expected = dense_attention(q, k, k, positions, window=window).weights.sum((1, 2))
    torch.testing.assert_close(mass.double(), expected, rtol=1e-4, atol=1e-5)


def test_scores_beyond_the_range_of_fp16(backend, device):
    q, k, v = large(device, torch.float16, 40, dim=192, value_dim=128)
    positions = scattered(17, 63, device)
    # products reach 40 * 40 * 192 = 307,200, the range of fp16 ends at 65,504
    out, lse = selective_attention(q, k, v, positions, return_lse=True, backend=backend)
    expected = dense_attention(q, k, v, positions)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=OUT[torch.float16])
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=0)
    mass = attention_mass(q, k, positions, backend=backend)
    torch.testing.assert_close(mass.double(), expected.weights.sum((1, 2)), rtol=2e-3, atol=2e-3)
