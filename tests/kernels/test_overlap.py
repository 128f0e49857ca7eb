import torch
from hypothesis import given
from hypothesis import strategies as st

from blend_kernels.rotation import share_memory

BUFFER = torch.zeros(400, dtype=torch.int16)


@st.composite
def views(draw):
    """Views of one buffer with two or three dimensions of any strides, and the bytes that each touches."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    strides = [draw(st.integers(0, 30)) for _ in sizes]
    view = BUFFER.as_strided(sizes, strides, draw(st.integers(0, 100)))
    places = torch.arange(400).as_strided(sizes, strides, view.storage_offset())
    return view, {2 * place + byte for place in places.flatten().tolist() for byte in range(2)}


@given(views(), views())
def test_views_share_memory_when_they_touch_the_same_bytes(first, second):
    assert share_memory(first[0], second[0]) == bool(first[1] & second[1])


def test_other_dtypes_of_the_same_bytes():
    halves = BUFFER[:10]
    assert share_memory(BUFFER.view(torch.int8)[19:25], halves)
    assert not share_memory(BUFFER.view(torch.int8)[20:25], halves)
    assert share_memory(BUFFER.view(torch.int64)[2:4], halves)


def test_tokens_of_a_cache_and_other_buffers():
    cache = torch.zeros(2, 4, 1000, 16).transpose(1, 2)
    assert not share_memory(cache[:, :500], cache[:, 500:])
    assert share_memory(cache[:, :501], cache[:, 500:])
    assert not share_memory(cache, torch.zeros(2, 1000, 4, 16))
    assert not share_memory(cache[:, :0], cache)
