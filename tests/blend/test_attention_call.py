import pytest
import torch
from blends import consecutive

from blend.model.attention import AttentionCall
from blend.model.cache import BlendedCache
from blend.model.driver import row_attention, running
from blend.model.passes import ForwardPass


def test_what_an_observer_sees_of_a_layer_with_sinks():
    """Rows 4 to 8 over nine keys with values of ones: the output is the share of the attention that keys get."""
    seen: list[AttentionCall] = []
    module, cache = torch.nn.Module(), BlendedCache(1, 9)
    module.layer_idx = 3  # type: ignore[assignment]
    q, k, v, sinks = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16), torch.ones(1, 2, 9, 16), torch.randn(4)
    cache.layers[0].write_run(0, k, v)
    forward = ForwardPass([consecutive(torch.zeros(1, 5, dtype=torch.int64), 4, cache, observe=seen.append)])
    with running(forward):
        shares = row_attention(module, q, *forward.write(0, k[:, :, 4:], v[:, :, 4:]), None, s_aux=sinks)[0]
    assert shares.shape == (1, 5, 4, 16)
    assert seen[0].layer == 3
    assert (shares < 0.99).any()
    torch.testing.assert_close(seen[0].masses()[0].sum(-1), shares[..., 0].sum(1), rtol=1e-5, atol=1e-5)


def test_attention_outside_of_a_pass_is_refused():
    with pytest.raises(RuntimeError, match="only inside a kvblend forward pass"):
        row_attention(torch.nn.Module(), *[torch.randn(1, 1, 1, 8)] * 3, None)
