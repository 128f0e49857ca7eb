import pytest
import torch

from blend_kernels import attention_mass, selective_attention
from tests.kernels.dense import dense_attention
from tests.kernels.test_selective_attention import make, scattered

RULES = [
    {},
    {"mode": "bottom-right"},
    {"window": 9},
    {"softcap": 2.0, "scale": 0.5},
    {"mode": "bottom-right", "window": 30},
]


def check(q, k, positions, backend, per_head=False, reduce="sum", known=False, **rule):
    """Against dense weights: the mass and that of the last row, with the log-sum-exp `known` or not."""
    dense = dense_attention(q, k, k, positions, **rule)
    lse = dense.lse.float() if known else None
    options = {"per_head": per_head, "reduce": reduce, "backend": backend, "lse": lse, **rule}
    mass, last = attention_mass(q, k, positions, with_last=True, **options)
    reduced = dense.weights.sum(2) if reduce == "sum" else dense.weights.amax(2)
    for actual, expected in ((mass, reduced), (last, dense.weights[:, :, -1])):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected if per_head else expected.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("per_head", "reduce", "known"), [(True, "max", True), (False, "sum", True), (True, "sum", False)]
)
def test_against_dense(rule, per_head, reduce, known, backend, device, poisoned):
    q, k, _ = make(device, keys=129)
    check(q, k, scattered(17, 129, device), backend, per_head, reduce, known, **rule)


SIZES = [(1, 1, 16), (17, 17, 80), (1, 63, 192), (63, 129, 16), (80, 200, 16)]


@pytest.mark.parametrize(("rows", "keys", "dim", "reduce"), [*((*size, "sum") for size in SIZES), (*SIZES[-1], "max")])
def test_awkward_sizes(rows, keys, dim, reduce, backend, device):
    q, k, _ = make(device, rows=rows, keys=keys, dim=dim, heads=7, kv_heads=1)
    check(q, k, scattered(rows, keys, device), backend, reduce == "max", reduce, known=True)


def test_keys_that_no_row_sees_have_none(backend, device):
    """Whole blocks of keys before every window and after every row."""
    q, k, _ = make(device, keys=300)
    positions = torch.arange(150, 167, device=device)
    check(q, k, positions, backend, per_head=True, known=True, window=9)


@pytest.mark.parametrize("rule", [{}, {"window": 9}], ids=str)
@pytest.mark.parametrize("known", [False, True])
def test_sinks_take_their_share(rule, known, backend, device):
    q, k, _ = make(device, keys=129)
    sinks = torch.randn(8, device=device)[::2]
    check(q, k, scattered(17, 129, device), backend, per_head=True, known=known, sinks=sinks, **rule)


def test_the_last_row_is_left_out_unless_wanted(backend, device):
    q, k, _ = make(device, keys=129)
    positions = scattered(17, 129, device)
    mass, _ = attention_mass(q, k, positions, with_last=True, backend=backend)
    assert torch.equal(mass, attention_mass(q, k, positions, backend=backend))


def test_attention_hands_over_its_log_sum_exp(backend, device):
    q, k, v = make(device, rows=5, keys=129, batch=2)
    positions, sinks = scattered(5, 129, device, batch=2), torch.randn(4, device=device)
    options = {"window": 40, "sinks": sinks, "backend": backend}
    _, lse = selective_attention(q, k, v, positions, return_lse=True, **options)
    mass = attention_mass(q, k, positions, lse=lse, **options)
    torch.testing.assert_close(mass, attention_mass(q, k, positions, **options), rtol=1e-5, atol=1e-6)
    of_third = attention_mass(q[:, :, 2:3], k, positions[:, 2:3], lse=lse[:, :, 2:3], **options)
    torch.testing.assert_close(
        of_third, attention_mass(q[:, :, 2:3], k, positions[:, 2:3], **options), rtol=1e-5, atol=1e-6
    )


def test_positions_of_each_batch_entry_and_of_any_stride(backend, device):
    q, k, _ = make(device, batch=2)
    positions = scattered(17, 63, device, batch=2)
    for given in (positions, positions.T.contiguous().T, positions[0].repeat_interleave(2)[::2]):
        check(q, k, given, backend)


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
    for known in (False, True):
        check(q, k, torch.arange(63), "torch", known=known)


def test_no_rows(backend, device):
    q, k, _ = make(device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    for mass in attention_mass(q[:, :, :0], k, empty, with_last=True, backend=backend):
        assert mass.shape == (1, 63)
        assert mass.eq(0).all()
