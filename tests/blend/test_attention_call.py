import torch

from blend.model.attention import AttentionCall, RowsInFlight, row_attention, rows_in_flight


def test_what_an_observer_sees_of_a_layer_with_sinks():
    seen: list[AttentionCall] = []
    module = torch.nn.Module()
    module.layer_idx = 3  # type: ignore[assignment]
    q, k, sinks = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16), torch.randn(4)
    with rows_in_flight(RowsInFlight(torch.arange(4, 9), observe=seen.append)):
        out, _ = row_attention(module, q, k, k, None, s_aux=sinks)
    # values of ones: the output is the share of the attention that keys get
    ones = torch.ones_like(k)
    with rows_in_flight(RowsInFlight(torch.arange(4, 9))):
        shares, _ = row_attention(module, q, k, ones, None, s_aux=sinks)
    assert out.shape == (1, 5, 4, 16)
    assert seen[0].layer == 3
    assert (shares < 0.99).any()
    torch.testing.assert_close(seen[0].mass(per_head=True).sum(-1), shares[..., 0].sum(1), rtol=1e-5, atol=1e-5)
