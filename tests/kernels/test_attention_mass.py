import pytest
import torch

from blend_kernels import Positions, attention_mass
from tests.kernels.dense import DEVICE, dense_attention
from tests.kernels.test_selective_attention import attention, make, scattered

SINKS = torch.linspace(-2, 1, 8, device=DEVICE)[::2]
RULES = [{}, {"window": 9}, {"softcap": 2.0, "scale": 0.5}, {"window": 9, "sinks": SINKS}]


def check(q, k, positions, backend, peak=False, with_lse=False, rtol=1e-5, **rule):
    """Against dense weights: their sum, or the largest ones and those of the last row; with the log-sum-exp or without."""
    dense = dense_attention(q, k, k, positions, **rule)
    lse = dense.lse.float() if with_lse else None
    masses = attention_mass(q, k, Positions(positions), peak=peak, lse=lse, backend=backend, **rule)
    weights = dense.weights
    kinds = (weights.amax(2), weights[:, :, -1]) if peak else (weights.sum(2),)
    assert masses.dtype == torch.float32
    torch.testing.assert_close(masses.double(), torch.stack(kinds), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("peak", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_against_dense(rule, peak, with_lse, backend, device, poisoned):
    q, k, _ = make(device, keys=129)
    check(q, k, scattered(17, 129, device), backend, peak, with_lse, **rule)


SIZES = [(1, 1, 16), (17, 17, 80), (1, 63, 192), (63, 129, 16), (80, 200, 16)]


@pytest.mark.parametrize(("rows", "keys", "dim", "peak"), [*((*size, False) for size in SIZES), (*SIZES[-1], True)])
def test_awkward_sizes(rows, keys, dim, peak, backend, device):
    q, k, _ = make(device, rows=rows, keys=keys, dim=dim, heads=7, kv_heads=1)
    check(q, k, scattered(rows, keys, device), backend, peak, with_lse=True)


def test_keys_that_no_row_sees_have_none(backend, device):
    """Whole blocks of keys before every window and after every row."""
    q, k, _ = make(device, keys=300)
    check(q, k, torch.arange(150, 167, device=device), backend, with_lse=True, window=9)


def test_attention_hands_over_its_log_sum_exp(backend, device):
    q, k, v = make(device, rows=5, keys=129, batch=2)
    positions = scattered(5, 129, device)
    options = {"window": 40, "sinks": torch.randn(4, device=device), "backend": backend}
    _, lse = attention(q, k, v, positions, **options)
    for rows in (slice(None), slice(2, 3)):
        part = (q[:, :, rows], k, Positions(positions[rows]))
        mass = attention_mass(*part, lse=lse[:, :, rows], **options)
        torch.testing.assert_close(mass, attention_mass(*part, **options), rtol=1e-5, atol=1e-6)


def test_runs_are_bit_equal(backend, device):
    q, k, _ = make(device, rows=63, keys=129)
    positions = Positions(scattered(63, 129, device))
    first = attention_mass(q, k, positions, backend=backend)
    assert torch.equal(first, attention_mass(q, k, positions, backend=backend))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores(dtype, backend, device):
    q, k, _ = make(device, dtype=dtype, dim=128)
    check(4 * q, 4 * k, scattered(17, 63, device), backend, rtol=1e-4, window=30)


@pytest.mark.parametrize("with_lse", [False, True])
def test_many_rows_in_bounded_blocks(with_lse, monkeypatch):
    monkeypatch.setattr("blend_kernels.mass.MOST_SCORES", 1000)
    q, k, _ = make("cpu", rows=63)
    for peak in (False, True):
        check(q, k, torch.arange(63), "torch", peak, with_lse)


def test_no_rows(backend, device):
    q, k, _ = make(device)
    empty = Positions(torch.empty(0, dtype=torch.int64, device=device))
    mass = attention_mass(q[:, :, :0], k, empty, peak=True, backend=backend)
    assert mass.shape == (2, 1, 4, 63)
    assert mass.eq(0).all()
