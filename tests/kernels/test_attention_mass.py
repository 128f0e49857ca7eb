import pytest
import torch

from blend_kernels import attention_mass
from tests.kernels.dense import dense_attention
from tests.kernels.test_selective_attention import make, scattered

RULES = [
    {},
    {"mode": "bottom-right"},
    {"window": 9},
    {"softcap": 2.0, "scale": 0.5},
    {"mode": "bottom-right", "window": 30},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_against_dense(rule, per_head, reduce, backend, device, poisoned):
    q, k, _ = make(device, keys=129)
    positions = scattered(17, 129, device)
    weights = dense_attention(q, k, k, positions, **rule).weights
    mass = attention_mass(q, k, positions, per_head=per_head, reduce=reduce, backend=backend, **rule)
    expected = weights.sum(2) if reduce == "sum" else weights.amax(2)
    expected = expected if per_head else expected.sum(1)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "keys", "dim"), [(1, 1, 16), (17, 17, 80), (1, 63, 192), (63, 129, 16), (129, 200, 16)]
)
def test_awkward_sizes(rows, keys, dim, backend, device):
    q, k, _ = make(device, rows=rows, keys=keys, dim=dim, heads=7, kv_heads=1)
    positions = scattered(rows, keys, device)
    expected = dense_attention(q, k, k, positions).weights.sum((1, 2))
    torch.testing.assert_close(
        attention_mass(q, k, positions, backend=backend).double(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rule", [{}, {"window": 9}], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_sinks_take_their_share(rule, per_head, backend, device):
    q, k, _ = make(device, keys=129)
    positions, sinks = scattered(17, 129, device), torch.randn(8, device=device)[::2]
    weights = dense_attention(q, k, k, positions, sinks=sinks, **rule).weights
    mass = attention_mass(q, k, positions, sinks=sinks, per_head=per_head, backend=backend, **rule)
    expected = weights.sum(2) if per_head else weights.sum((1, 2))
    torch.testing.assert_close(mass.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [63, 129])
def test_the_peak_over_several_tiles_of_rows(rows, backend, device):
    q, k, _ = make(device, rows=rows, keys=200, heads=4, kv_heads=2)
    positions = scattered(rows, 200, device)
    expected = dense_attention(q, k, k, positions).weights.amax(2)
    found = attention_mass(q, k, positions, per_head=True, reduce="max", backend=backend)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_another_reduction_is_refused(device):
    q, k, _ = make(device)
    with pytest.raises(ValueError, match="reduce must be 'sum' or 'max', got 'mean'"):
        attention_mass(q, k, scattered(17, 63, device), reduce="mean")


def test_positions_of_each_batch_entry(backend, device):
    q, k, _ = make(device, batch=2)
    positions = scattered(17, 63, device, batch=2)
    expected = dense_attention(q, k, k, positions).weights.sum((1, 2))
    torch.testing.assert_close(
        attention_mass(q, k, positions, backend=backend).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_positions_of_any_stride(backend, device):
    q, k, _ = make(device, batch=2)
    positions = scattered(17, 63, device, batch=2).T.contiguous().T
    for strided in (positions, positions[0].repeat_interleave(2)[::2]):
        expected = dense_attention(q, k, k, strided).weights.sum((1, 2))
        found = attention_mass(q, k, strided, backend=backend)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_runs_are_bit_equal(backend, device):
    q, k, _ = make(device, rows=63, keys=129)
    positions = scattered(63, 129, device)
    first = attention_mass(q, k, positions, backend=backend)
    assert torch.equal(first, attention_mass(q, k, positions, backend=backend))


def test_sums_to_the_number_of_softmaxes_and_leaves_the_future_empty(backend, device):
    q, k, _ = make(device)
    positions = torch.arange(10, 27, device=device)
    mass = attention_mass(q, k, positions, backend=backend)
    torch.testing.assert_close(mass.sum(), torch.tensor(4 * 17.0, device=device), rtol=1e-5, atol=0)
    assert mass[:, 27:].eq(0).all()


def test_many_rows_in_bounded_blocks(monkeypatch):
    monkeypatch.setattr("blend_kernels.mass.MOST_SCORES", 1000)
    q, k, _ = make("cpu", rows=63)
    expected = dense_attention(q, k, k, torch.arange(63)).weights.sum((1, 2))
    torch.testing.assert_close(attention_mass(q, k, torch.arange(63)).double(), expected, rtol=1e-5, atol=1e-5)


def test_no_rows(backend, device):
    q, k, _ = make(device)
    assert attention_mass(q[:, :, :0], k, torch.empty(0, dtype=torch.int64, device=device), backend=backend).eq(0).all()
