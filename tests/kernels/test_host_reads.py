"""What runs on a GPU never waits for it: no op reads a device value on the host."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blend_kernels import attention_mass, decode_attention, selective_attention
from blend_kernels.attention_plain import Rows, attend_under_mask
from blend_kernels.checks import Rule
from blend_kernels.positions import Positions
from tests.kernels.dense import close, dense_attention
from tests.kernels.test_selective_attention import make, scattered

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")


class Dispatched(TorchDispatchMode):
    """Notes the ops that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention(q, k, v, positions, backend, **rule):
    _, lse = selective_attention(q, k, v, positions, return_lse=True, backend=backend, **rule)
    attention_mass(q, k, positions, lse=lse, with_last=True, per_head=True, reduce="max", backend=backend, **rule)
    attention_mass(q, k, positions, backend=backend, **rule)


@pytest.mark.parametrize("mode", ["exact", "bottom-right"])
@pytest.mark.parametrize("batch", [None, 2])
def test_kernels_read_nothing_on_the_host(mode, batch, device, monkeypatch):
    # on a GPU, positions are checked on request only
    for op in ("attention", "mass"):
        monkeypatch.setattr(f"blend_kernels.{op}.check_positions", lambda positions, *_: (positions, None))
    q, k, v = make(device, rows=5, keys=129, batch=batch or 1)
    positions, sinks = scattered(5, 129, device, batch), torch.randn(4, device=device)
    with Dispatched() as dispatched:
        attention(q, k, v, positions, "triton", mode=mode, window=9, softcap=3.0, sinks=sinks)
        decode_attention(q[:, :, :1], k, v, window=9, backend="triton")
    assert [name for name in dispatched.names if name in READS] == []
    assert "empty" in dispatched.names


def test_decoding_makes_no_positions(device):
    q, k, v = make(device, rows=1, keys=600)
    with Dispatched() as dispatched:
        decode_attention(q, k, v, backend="triton")
    assert {"full", "arange", "zeros", "ones", "scalar_tensor", "lift_fresh"}.isdisjoint(dispatched.names)


@pytest.mark.parametrize("rule", [{}, {"window": 9}, {"mode": "bottom-right"}], ids=str)
@pytest.mark.parametrize("batch", [None, 2])
def test_plain_paths_run_where_no_value_can_be_read(rule, batch):
    """Tensors without memory stand for a GPU's: whatever reads one raises."""
    q, k, v = (x.to("meta") for x in make("cpu", rows=5, keys=129, batch=batch or 1))
    positions = scattered(5, 129, "cpu", batch).to("meta")
    attention(q, k, v, positions, "torch", **rule)
    assert decode_attention(q[:, :, :1], k, v, backend="torch").shape == (batch or 1, 4, 1, 32)


@pytest.mark.parametrize(
    "rule", [Rule("exact", None, None, 0.2), Rule("exact", 9, None, 0.2), Rule("exact", None, 3.0, 0.2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1 << 26, 4 * 129 * 2])
def test_the_plain_path_without_reads_computes_the_same(rule, dtype, at_once, monkeypatch, poisoned):
    monkeypatch.setattr("blend_kernels.attention_plain.MOST_SCORES", at_once)
    q, k, v = make("cpu", rows=7, keys=129, value_dim=48, dtype=dtype)
    positions = torch.tensor([60, 61, 61, 70, 80, 81, 100])
    k[:, :, 101:], v[:, :, 101:] = float("nan"), float("nan")
    if rule.window is not None:
        k[:, :, :52], v[:, :, :52] = float("nan"), float("nan")
    out, lse = torch.empty(1, 4, 7, 48, dtype=dtype), torch.empty(1, 4, 7)
    attend_under_mask(Rows(q, k, v, Positions(positions), rule), out, lse)
    expected = dense_attention(q, k.nan_to_num(), v.nan_to_num(), positions, *rule)
    close(out, expected.out)
    close(lse, expected.lse, dtype)
