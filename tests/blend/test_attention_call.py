import pytest
import torch

from blend.model.attention import AttentionCall
from blend.model.cache import BlendedCache, Run
from blend.model.driver import row_attention, running
from blend.model.passes import ForwardPass, RowRequest


def test_what_an_observer_sees_of_a_layer_with_sinks():
    seen: list[AttentionCall] = []
    module = torch.nn.Module()
    module.layer_idx = 3  # type: ignore[assignment]
    q, k, sinks = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16), torch.randn(4)
    out = _attend(module, q, k, k, sinks, seen.append)
    # values of ones: the output is the share of the attention that keys get
    ones = torch.ones_like(k)
    shares = _attend(module, q, k, ones, sinks, None)
    assert out.shape == (1, 5, 4, 16)
    assert seen[0].layer == 3
    assert (shares < 0.99).any()
    torch.testing.assert_close(seen[0].masses()[0].sum(-1), shares[..., 0].sum(1), rtol=1e-5, atol=1e-5)


def _attend(module, q, k, v, sinks, observe):
    """Rows 4 to 8 over nine keys, of which a cache holds all."""
    cache = BlendedCache(1, 9)
    cache.layers[0].write_run(0, k, v)
    request = RowRequest(
        torch.zeros(1, 5, dtype=torch.int64), Run.consecutive(4, 9, torch.device("cpu")), cache, observe=observe
    )
    forward = ForwardPass([request])
    with running(forward):
        return row_attention(module, q, *forward.write(0, k[:, :, 4:], v[:, :, 4:]), None, s_aux=sinks)[0]


def test_attention_outside_of_a_pass_is_refused():
    with pytest.raises(RuntimeError, match="only inside a kvblend forward pass"):
        row_attention(torch.nn.Module(), *[torch.randn(1, 1, 1, 8)] * 3, None)
