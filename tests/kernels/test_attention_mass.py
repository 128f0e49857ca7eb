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


def check(q, k, positions, backend, per_head=False, reduce="sum", **rule):
    weights = dense_attention(q, k, k, positions, **rule).weights
    mass = attention_mass(q, k, positions, per_head=per_head, reduce=reduce, backend=backend, **rule)
    expected = weights.sum(2) if reduce == "sum" else weights.amax(2)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), expected if per_head else expected.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_against_dense(rule, per_head, reduce, backend, device, poisoned):
    q, k, _ = make(device, keys=129)
    check(q, k, scattered(17, 129, device), backend, per_head, reduce, **rule)


SIZES = [(1, 1, 16), (17, 17, 80), (1, 63, 192), (63, 129, 16), (129, 200, 16)]


@pytest.mark.parametrize(
    ("rows", "keys", "dim", "reduce"), [*((*size, "sum") for size in SIZES), *((*size, "max") for size in SIZES[-2:])]
)
def test_awkward_sizes(rows, keys, dim, reduce, backend, device):
    q, k, _ = make(device, rows=rows, keys=keys, dim=dim, heads=7, kv_heads=1)
    check(q, k, scattered(rows, keys, device), backend, reduce == "max", reduce)


@pytest.mark.parametrize("rule", [{}, {"window": 9}], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_sinks_take_their_share(rule, per_head, backend, device):
    q, k, _ = make(device, keys=129)
    check(q, k, scattered(17, 129, device), backend, per_head, sinks=torch.randn(8, device=device)[::2], **rule)


def test_positions_of_each_batch_entry_and_of_any_stride(backend, device):
    q, k, _ = make(device, batch=2)
    positions = scattered(17, 63, device, batch=2)
    for given in (positions, positions.T.contiguous().T, positions[0].repeat_interleave(2)[::2]):
        check(q, k, given, backend)


def test_another_reduction_is_refused(device):
    q, k, _ = make(device)
    with pytest.raises(ValueError, match="reduce must be 'sum' or 'max', got 'mean'"):
        attention_mass(q, k, scattered(17, 63, device), reduce="mean")


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
    check(q, k, torch.arange(63), "torch")


def test_no_rows(backend, device):
    q, k, _ = make(device)
    assert attention_mass(q[:, :, :0], k, torch.empty(0, dtype=torch.int64, device=device), backend=backend).eq(0).all()
