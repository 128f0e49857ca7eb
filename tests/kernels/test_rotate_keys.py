import math

import pytest
import torch

from blend_kernels import rotate_keys
from tests.kernels.dense import dense_rotation

TOKENS = 21


def frequencies(pairs, device):
    return (10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)).to(device)


def expected(k, delta, inv_freq, interleaved=False, offset=0):
    delta = torch.as_tensor(delta, dtype=torch.float64, device=k.device).expand(k.shape[-2])
    return dense_rotation(k, delta[:, None] * inv_freq.double(), interleaved, offset)


def deltas(device):
    return torch.tensor([5] * 8 + [-3] * 12 + [100_000], device=device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "pairs", "offset"), [(32, 16, 0), (80, 40, 0), (64, 16, 0), (64, 16, 32), (48, 6, 10), (192, 32, 128)]
)
@pytest.mark.parametrize("per_token", [False, True])
def test_layouts(interleaved, dim, pairs, offset, per_token, backend, device, poisoned):
    k = torch.randn(2, 3, TOKENS, dim, device=device)
    before, inv_freq = k.clone(), frequencies(pairs, device)
    delta = deltas(device) if per_token else -17
    out = rotate_keys(k, delta, inv_freq, interleaved=interleaved, rotary_offset=offset, backend=backend)
    torch.testing.assert_close(out.double(), expected(k, delta, inv_freq, interleaved, offset), rtol=0, atol=3e-6)
    assert torch.equal(k, before)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 63, 129])
def test_awkward_sizes(tokens, interleaved, backend, device, poisoned):
    k, delta, inv_freq = (
        torch.randn(2, 2, tokens, 48, device=device),
        torch.arange(tokens) * 7 - 30,
        frequencies(20, device),
    )
    delta = delta.to(device)
    out = rotate_keys(k, delta, inv_freq, interleaved=interleaved, rotary_offset=5, backend=backend)
    torch.testing.assert_close(out.double(), expected(k, delta, inv_freq, interleaved, 5), rtol=0, atol=3e-6)
    again = rotate_keys(k, delta, inv_freq, interleaved=interleaved, rotary_offset=5, backend=backend)
    assert torch.equal(out, again)


def test_deltas_and_frequencies_of_any_stride(backend, device):
    k, delta, inv_freq = torch.randn(2, 3, TOKENS, 32, device=device), deltas(device), frequencies(16, device)
    spaced = [x.repeat_interleave(2).add_(torch.arange(2 * len(x), device=device) % 2)[::2] for x in (delta, inv_freq)]
    out = rotate_keys(k, *spaced, backend=backend)
    torch.testing.assert_close(out.double(), expected(k, delta, inv_freq), rtol=0, atol=3e-6)


def test_to_other_tokens_of_the_same_cache(backend, device):
    cache, inv_freq = torch.randn(2, 3, 60, 32, device=device), frequencies(16, device)
    k = cache[:, :, :TOKENS]
    before = k.clone()
    out = rotate_keys(k, 9, inv_freq, out=cache[:, :, TOKENS : 2 * TOKENS], backend=backend)
    torch.testing.assert_close(out.double(), expected(before, 9, inv_freq), rtol=0, atol=3e-6)
    assert torch.equal(k, before)


@pytest.mark.parametrize("delta", [131_072, -1_000_003])
def test_far_moves_keep_their_angle(delta, backend, device):
    k, inv_freq = torch.randn(1, 1, 4, 64, device=device), frequencies(32, device)
    out = rotate_keys(k, delta, inv_freq, backend=backend)
    torch.testing.assert_close(out.double(), expected(k, delta, inv_freq), rtol=0, atol=3e-6)


def test_writes_only_its_slice_of_the_blended_cache(backend, device):
    cache = torch.full((1, 3, 60, 32), 7.0, device=device)
    k, inv_freq = torch.randn(1, 3, TOKENS, 32, device=device).bfloat16(), frequencies(16, device)
    target = cache[:, :, 20 : 20 + TOKENS]
    assert rotate_keys(k, deltas(device), inv_freq, out=target, backend=backend) is target
    torch.testing.assert_close(target.double(), expected(k, deltas(device), inv_freq), rtol=0, atol=3e-6)
    assert cache[:, :, :20].eq(7).all()
    assert cache[:, :, 20 + TOKENS :].eq(7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(dtype, backend, device):
    k, inv_freq = torch.randn(2, TOKENS, 32, device=device).to(dtype), frequencies(16, device)
    out = rotate_keys(k, 77, inv_freq, backend=backend)
    error = (out.double() - expected(k, 77, inv_freq)).abs()
    # the interpreter cuts bf16 off where GPUs round to nearest
    ulps = 1.0 if (backend, device, dtype) == ("triton", "cpu", torch.bfloat16) else 0.5
    assert (error <= expected(k, 77, inv_freq).abs() * torch.finfo(dtype).eps * ulps + 1e-6).all()


def test_quarter_turn_is_exact_in_both_layouts(backend, device):
    k = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], device=device)
    inv_freq = torch.full((2,), math.pi / 2, dtype=torch.float64, device=device)
    half = rotate_keys(k, 1, inv_freq, backend=backend)
    pairs = rotate_keys(k, 1, inv_freq, interleaved=True, backend=backend)
    torch.testing.assert_close(half, torch.tensor([[[-3.0, -4.0, 1.0, 2.0]]], device=device), rtol=0, atol=1e-6)
    torch.testing.assert_close(pairs, torch.tensor([[[-2.0, 1.0, -4.0, 3.0]]], device=device), rtol=0, atol=1e-6)
