"""Memory for KV in pages of its own: ordinary tensors, and given back as soon as nobody has them."""

import os
import sys
from pathlib import Path

import pytest
import torch

from blend.model import cpu

CPU = torch.device("cpu")
HUGE = 1 << 27  # bytes; they are asked for, and all but a few never touched


def memory() -> tuple[int, int]:
    """Bytes that this process has mapped, and that it takes."""
    mapped, resident, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(mapped) * os.sysconf("SC_PAGE_SIZE"), int(resident) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4096, 64), (2, 3, 4), (2, 0, 4)])
def test_an_ordinary_tensor(shape, dtype):
    found = cpu.empty(shape, dtype, CPU)
    assert (tuple(found.shape), found.dtype, found.is_contiguous()) == (shape, dtype, True)
    assert torch.equal(found.fill_(3), torch.full(shape, 3, dtype=dtype))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_large_ones_go_back_at_once_and_stay_while_a_part_is_in_use():
    before, _ = memory()
    found = [cpu.empty((HUGE // 4,), torch.float32, CPU) for _ in range(3)]
    assert found[0].data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0
    part = found[0][1000:1010]
    assert memory()[0] - before > 2.5 * HUGE
    del found
    assert 0.5 * HUGE < memory()[0] - before < 1.5 * HUGE
    assert part.fill_(1).sum() == part.numel()
    del part
    assert memory()[0] - before < 0.5 * HUGE


def test_copies_are_equal_and_apart_from_what_was_copied():
    whole = torch.randn(3, 50, 8)
    parts = (whole[:, 10:40], whole[1:, :20, :4], whole[:, :0])
    expected = [part.clone() for part in parts]
    copies = cpu.copies(parts)
    whole.zero_()
    assert all(torch.equal(copy, part) for copy, part in zip(copies, expected, strict=True))
    copies[0].zero_()
    assert torch.equal(copies[1], expected[1])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_what_was_freed_between_what_is_held_can_be_given_back():
    # Pieces as large as pages, every second of which is let go of: none of it is at the end of the C library's pool.
    pieces = [torch.ones(16_384) for _ in range(2_000)]
    del pieces[::2]
    _, before = memory()
    if not cpu.trim_heap():
        pytest.skip("the C library has no malloc_trim")
    assert before - memory()[1] > 40e6
    assert all(piece.sum() == piece.numel() for piece in pieces)
