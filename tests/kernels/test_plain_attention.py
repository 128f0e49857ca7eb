"""The torch path: blocks of hundreds of rows, long runs, decoding, a torch without its fused op, and what runs on a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blend_kernels import Positions, attention_mass, attention_plain, decode_attention
from blend_kernels.attention_plain import attend_under_mask
from blend_kernels.work import Rule, Work, empty_results
from tests.kernels.dense import close, dense_attention
from tests.kernels.test_selective_attention import attention, check, make, scattered

KEYS = 900
PATTERNS = {
    "scattered": lambda: torch.randperm(KEYS)[:150].sort().values,
    "all": lambda: torch.arange(KEYS),
    "suffix": lambda: torch.arange(KEYS - 64, KEYS),
    "chunk starts": lambda: torch.arange(KEYS)[torch.arange(KEYS) % 120 < 16],
    "long run inside": lambda: torch.cat([torch.tensor([3, 50]), torch.arange(200, 500), torch.tensor([640, 899])]),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("keys", [1100, 2051])
def test_few_rows_on_many_threads_cut_the_keys(rows, keys, batch, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    q = torch.randn(batch, 6, rows, 16)
    k, v = (torch.randn(batch, keys + 50, 2, 16).transpose(1, 2)[:, :, :keys] for _ in "kv")
    check(q, k, v, torch.arange(keys - rows, keys))


RULES = [{}, {"window": 100}, {"window": 700}, {"softcap": 5.0}]


@pytest.mark.parametrize(
    ("pattern", "rule", "keys_first"),
    [
        *((pattern, rule, True) for pattern in ("chunk starts", "long run inside") for rule in RULES),
        *((pattern, rule, False) for pattern in PATTERNS for rule in RULES[:2]),
    ],
    ids=str,
)
def test_patterns(pattern, rule, keys_first):
    positions = PATTERNS[pattern]()
    q = torch.randn(2, 6, len(positions), 16)
    shape = (2, KEYS, 2, 16) if keys_first else (2, 2, KEYS, 16)
    k, v = (torch.randn(shape).transpose(1, 2) if keys_first else torch.randn(shape) for _ in range(2))
    check(q, k, v, positions, **rule)


DECODED = [
    {"keys": 1},
    {"keys": 600},
    {"heads": 14, "kv_heads": 2, "dim": 16},
    {"dtype": torch.bfloat16, "keys": 129},
    {"dim": 48, "value_dim": 16},
    {"heads": 32, "kv_heads": 1, "dim": 8, "keys": 8200, "dtype": torch.bfloat16},  # enough pairs for plain products
    {"batch": 2},
]


@pytest.mark.parametrize("shape", DECODED, ids=str)
@pytest.mark.parametrize("rule", [{}, {"window": 40}, {"window": 10_000, "scale": 0.7}], ids=str)
def test_in_decoding_a_row_sees_all_keys(shape, rule, poisoned):
    q, k, v = make("cpu", rows=1, **shape)
    last = torch.tensor([k.shape[2] - 1])
    out = decode_attention(q, k, v, **rule)
    assert out.dtype == q.dtype
    close(out, dense_attention(q, k, v, last, **rule).out)
    assert torch.equal(out, attention(q, k, v, last, **rule)[0])


@pytest.mark.parametrize("rule", [{}, {"window": 9}], ids=str)
@pytest.mark.parametrize("rows", [1, 40, 120])
def test_without_torchs_private_op_results_are_the_same(monkeypatch, rows, rule):
    q = torch.randn(1, 4, rows, 32)
    k, v = torch.randn(2, 1, 2, 120, 32).unbind()
    monkeypatch.setattr(attention_plain, "FUSED", "_an_op_that_is_gone")
    check(q, k, v, scattered(rows, 120, "cpu"), **rule)


READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")


class Dispatched(TorchDispatchMode):
    """Notes the ops that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attend_and_score(q, k, v, positions, backend, **rule):
    _, lse = attention(q, k, v, positions, backend=backend, **rule)
    for options in ({"lse": lse, "peak": True}, {}):
        attention_mass(q, k, Positions(positions), backend=backend, **options, **rule)


def test_kernels_read_nothing_on_the_host(device):
    q, k, v = make(device, rows=5, keys=129, batch=2)
    sinks = torch.randn(4, device=device)
    with Dispatched() as dispatched:
        attend_and_score(q, k, v, scattered(5, 129, device), "triton", window=9, softcap=3.0, sinks=sinks)
    assert dispatched.names
    assert not {*dispatched.names} & {*READS}


@pytest.mark.parametrize("window", [None, 9])
def test_plain_paths_run_where_no_value_can_be_read(window):
    """Tensors without memory stand for a GPU's: whatever reads one raises."""
    q, k, v = (x.to("meta") for x in make("cpu", rows=5, keys=129, batch=2))
    attend_and_score(q, k, v, scattered(5, 129, "cpu").to("meta"), "torch", window=window)


@pytest.mark.parametrize("rule", [Rule(None, None, 0.2), Rule(9, None, 0.2), Rule(None, 3.0, 0.2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1 << 26, 4 * 129 * 2])
def test_the_plain_path_without_reads_computes_the_same(rule, dtype, at_once, monkeypatch, poisoned):
    monkeypatch.setattr("blend_kernels.attention_plain.MOST_SCORES", at_once)
    q, k, v = make("cpu", rows=7, keys=129, value_dim=48, dtype=dtype)
    positions = torch.tensor([60, 61, 61, 70, 80, 81, 100])
    k[:, :, 101:], v[:, :, 101:] = float("nan"), float("nan")
    if rule.window is not None:
        k[:, :, :52], v[:, :, :52] = float("nan"), float("nan")
    out, lse = empty_results(q, 48)
    attend_under_mask(Work(q, k, v, Positions(positions), rule), out, lse)
    expected = dense_attention(q, k.nan_to_num(), v.nan_to_num(), positions, *rule)
    close(out, expected.out)
    close(lse, expected.lse, dtype)
