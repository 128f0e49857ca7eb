"""The dense float64 references: a mask in memory, a softmax in memory, complex numbers for rotations."""

from typing import NamedTuple

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Dense(NamedTuple):
    """Output, log-sum-exp and weights, all float64."""

    out: torch.Tensor
    lse: torch.Tensor
    weights: torch.Tensor


def dense_attention(q, k, v, positions, window=None, softcap=None, scale=None, sinks=None):
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhmd,bhnd->bhmn", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    last = positions[:, None]
    key = torch.arange(k.shape[2], device=q.device)
    hidden = key > last
    if window is not None:
        hidden |= key <= last - window
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[None, :, None])
    weights = torch.exp(scores - lse[..., None])
    return Dense(torch.einsum("bhmn,bhnd->bhmd", weights, v), lse, weights)


def dense_rotation(x, angles, interleaved=False, offset=0):
    """`x` turned by `angles` `[tokens, pairs]`, as multiplication of complex numbers."""
    pairs = angles.shape[1]
    x = x.double().clone()
    turned = x[..., offset : offset + 2 * pairs]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(pairs, -1)
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    stacked = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    x[..., offset : offset + 2 * pairs] = stacked
    return x


# Largest error allowed against float64, for inputs of unit variance: a few units in the last place of the output.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(actual, expected, dtype=None):
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE[dtype or actual.dtype])
