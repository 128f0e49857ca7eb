import pytest
import torch

from blend_kernels import kv_deviation


def tensors(device, rows=17, dim=24, heads=3, dtype=torch.float32):
    return torch.randn(2, rows, heads, dim, device=device).to(dtype).transpose(1, 2)


def reference(new, old, norm):
    difference = (new.double() - old.double()).transpose(1, 2).flatten(2)
    return difference.abs().sum(-1) if norm == "l1" else difference.norm(dim=-1) ** 2


@pytest.mark.parametrize(
    ("norm", "parts", "rows"),
    [
        *((norm, parts, 17) for norm in ("l1", "l2sq") for parts in ("k", "v", "kv")),
        *(("l2sq", "kv", n) for n in (1, 63, 129)),
    ],
)
def test_against_norms(norm, parts, rows, backend, device, poisoned):
    keys = tensors(device, rows), tensors(device, rows)
    values = tensors(device, rows, 80, heads=2), tensors(device, rows, 80, heads=2)
    expected = sum(reference(*pair, norm) for name, pair in (("k", keys), ("v", values)) if name in parts)
    found = kv_deviation(*keys, *values, norm=norm, parts=parts, backend=backend)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_unused_pair_may_be_absent_and_dtypes_differ(backend, device):
    new, old = tensors(device), tensors(device, dtype=torch.bfloat16)
    found = kv_deviation(None, None, new, old, parts="v", backend=backend)
    torch.testing.assert_close(found.double(), reference(new, old, "l2sq"), rtol=1e-5, atol=1e-4)


def test_equal_rows_deviate_by_nothing(backend, device):
    k = tensors(device)
    moved = k.clone()
    moved[:, 1, 5] += 1
    found = kv_deviation(moved, k, None, None, parts="k", backend=backend)
    assert found.ne(0).nonzero().tolist() == [[0, 5], [1, 5]]


def test_runs_are_bit_equal(backend, device):
    tensors_of_four = [tensors(device, 63) for _ in range(4)]
    first = kv_deviation(*tensors_of_four, parts="kv", backend=backend)
    assert torch.equal(first, kv_deviation(*tensors_of_four, parts="kv", backend=backend))
