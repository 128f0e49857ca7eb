import pytest
import torch

from blend_kernels import attention_mass, kv_deviation, rotate_keys, selective_attention

Q, K, V = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
ROWS = torch.tensor([0, 2, 3, 7, 8])
FREQ = torch.ones(8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": Q[0]}, "q must be"),
        ({"k": K[0]}, "k must be"),
        ({"k": K[..., :8]}, "head_dim 8, q has 16"),
        ({"k": K.repeat(2, 1, 1, 1), "v": V.repeat(2, 1, 1, 1)}, "batch 2, q has 1"),
        ({"q": torch.randn(1, 3, 5, 16)}, "3 query heads are no multiple of 2"),
        ({"v": V[:, :, :8]}, "v must be"),
        ({"v": V.half()}, "v is torch.float16"),
        ({"k": K.half(), "v": V.half()}, "k is torch.float16"),
        ({"q": Q.long()}, "q must be floating point"),
        ({"k": K[:, :, :0], "v": V[:, :, :0]}, "no keys"),
        ({"k": torch.randn(1, 2, 16, 9).mT}, "must be contiguous"),
        ({"positions": ROWS[:4]}, "positions must be"),
        ({"positions": ROWS.float()}, "positions must be int64"),
        ({"positions": ROWS.flip(0)}, "sorted"),
        ({"positions": ROWS + 1}, r"\[0, 9\)"),
        ({"positions": ROWS - 1}, r"\[0, 9\)"),
        ({"positions": torch.zeros(2, 5, dtype=torch.int64)}, "positions must be"),
        ({"mode": "causal"}, "mode must be"),
        ({"window": 0}, "window must be"),
        ({"window": 2.5}, "window must be"),
        ({"softcap": 0.0}, "softcap must be"),
        ({"scale": -1.0}, "scale must be"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks must be float32"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks must be on cpu"),
        ({"k": K.to("meta"), "v": V.to("meta")}, "k is on meta"),
        ({"v": V.to("meta")}, "v is on meta"),
        ({"positions": ROWS.to("meta")}, "positions must be on cpu"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_selective_attention(changed, message):
    arguments = {"q": Q, "k": K, "v": V, "positions": ROWS, **changed}
    with pytest.raises(ValueError, match=message):
        selective_attention(**arguments)


def test_more_rows_than_keys_at_the_bottom_right():
    with pytest.raises(ValueError, match="at least as many keys as rows"):
        selective_attention(Q, K[:, :, :3], V[:, :, :3], torch.zeros(5, dtype=torch.int64), mode="bottom-right")


def test_triton_without_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        selective_attention(Q, K, V, ROWS, backend="triton")


def test_triton_takes_no_float64():
    with pytest.raises(ValueError, match="no float64"):
        selective_attention(Q.double(), K.double(), V.double(), ROWS, backend="triton")
    with pytest.raises(ValueError, match="no float64"):
        rotate_keys(K, 3, FREQ, out=K.double(), backend="triton")
    with pytest.raises(ValueError, match="no float64"):
        kv_deviation(None, None, V, V.double(), backend="triton")


def test_heads_wider_than_the_kernels_go_to_torch():
    q, k = torch.randn(1, 2, 5, 320), torch.randn(1, 2, 9, 320)
    assert selective_attention(q, k, k, ROWS).shape == q.shape
    with pytest.raises(ValueError, match="up to 256"):
        selective_attention(q, k, k, ROWS, backend="triton")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": ROWS.flip(0)}, "sorted"),
        ({"lse": torch.zeros(1, 5, 4)}, r"lse must be \[batch, heads, rows\] = \[1, 4, 5\], got \[1, 5, 4\]"),
        ({"lse": torch.zeros(1, 4, 5, dtype=torch.float64)}, "lse must be float32"),
        ({"lse": torch.zeros(1, 4, 5, device="meta")}, "lse must be on cpu"),
        ({"reduce": "mean"}, "reduce must be 'sum' or 'max', got 'mean'"),
    ],
)
def test_attention_mass(changed, message):
    with pytest.raises(ValueError, match=message):
        attention_mass(**{"q": Q, "k": K, "positions": ROWS, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": K[0, 0]}, "k must be"),
        ({"k": K.to(torch.int8)}, "k must be floating point"),
        ({"delta": ROWS}, "delta must be"),
        ({"delta": torch.ones(9)}, "delta must be"),
        ({"delta": torch.ones(9, dtype=torch.int64, device="meta")}, "delta must be on cpu"),
        ({"delta": 1.5}, "delta must be"),
        ({"inv_freq": FREQ.half()}, "inv_freq must be"),
        ({"inv_freq": FREQ.to("meta")}, "inv_freq is on meta"),
        ({"inv_freq": FREQ.repeat(2)}, "should turn, but head_dim is 16"),
        ({"rotary_offset": 4}, "dimensions 4 to 20"),
        ({"rotary_offset": -2}, "dimensions -2 to 14"),
        ({"out": K[:, :, :4]}, "shape of k"),
        ({"out": K.to(torch.int8)}, "out must be floating point"),
        ({"out": K}, "turning in place is refused"),
        ({"k": K[:, :, :6], "out": K[:, :, 3:]}, "shares memory with k"),
        ({"out": torch.zeros(1, 1, 9, 16).expand(K.shape)}, "stride 0"),
    ],
)
def test_rotate_keys(changed, message):
    arguments = {"k": K, "delta": 3, "inv_freq": FREQ, **changed}
    with pytest.raises(ValueError, match=message):
        rotate_keys(**arguments)


@pytest.mark.parametrize(
    ("pair", "rule", "message"),
    [
        ((K, K), {"norm": "max"}, "norm must be"),
        ((K, K), {"parts": "q"}, "parts must be"),
        ((K, None), {"parts": "k"}, "are needed"),
        ((K, K[:, :, :3]), {"parts": "k"}, "must both be"),
        ((K.long(), K), {"parts": "k"}, "floating point"),
        ((K, K), {"parts": "kv"}, "same batch and rows"),
        ((K.to("meta"), K), {"parts": "k"}, "k_new is on meta"),
        ((K[:, :, :4].to("meta"), K[:, :, :4].to("meta")), {"parts": "kv"}, "same device, got meta, cpu"),
    ],
)
def test_kv_deviation(pair, rule, message):
    with pytest.raises(ValueError, match=message):
        kv_deviation(*pair, V[:, :, :4], V[:, :, :4], **rule)
