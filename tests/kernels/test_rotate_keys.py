import pytest
import torch

from blend_kernels import Deltas, Turn, rotate_keys
from tests.kernels.dense import dense_rotation

TOKENS = 21
DELTAS = torch.tensor([5] * 8 + [131_072] * 12 + [-1_000_003])


def frequencies(pairs):
    return 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)


def expected(k, delta, inv_freq, interleaved=False, offset=0):
    return dense_rotation(k, delta[:, None] * inv_freq, interleaved, offset)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "pairs", "offset"), [(32, 16, 0), (80, 40, 0), (64, 16, 0), (64, 16, 32), (48, 6, 10), (192, 32, 128)]
)
def test_layouts(interleaved, dim, pairs, offset, poisoned):
    k = torch.randn(2, 3, TOKENS, dim)
    before, inv_freq = k.clone(), frequencies(pairs)
    out = rotate_keys(k, Deltas(DELTAS), Turn(inv_freq, interleaved, offset))
    torch.testing.assert_close(out.double(), expected(k, DELTAS, inv_freq, interleaved, offset), rtol=0, atol=3e-6)
    assert torch.equal(k, before)


def test_writes_only_its_slice_of_the_blended_cache():
    cache = torch.full((1, 3, 60, 32), 7.0)
    k, inv_freq = torch.randn(1, 3, TOKENS, 32).bfloat16(), frequencies(16)
    target = cache[:, :, 20 : 20 + TOKENS]
    assert rotate_keys(k, Deltas(DELTAS), Turn(inv_freq), target) is target
    torch.testing.assert_close(target.double(), expected(k, DELTAS, inv_freq), rtol=0, atol=3e-6)
    assert cache[:, :, :20].eq(7).all()
    assert cache[:, :, 20 + TOKENS :].eq(7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(dtype):
    k, inv_freq = torch.randn(2, TOKENS, 32).to(dtype), frequencies(16)
    out = rotate_keys(k, Deltas(DELTAS), Turn(inv_freq))
    exact = expected(k, DELTAS, inv_freq)
    assert ((out.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6).all()
