"""Threads beside the model's must not make helpers of their own: with more threads than cores all of them go to sleep."""

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from blends import filled
from cases import make_layout
from models import decoder

from blend.config import BlendConfig
from blend.model.cpu import end_helpers, set_threads, use_one_thread
from tests.store.reading import watched


@pytest.fixture(autouse=True)
def _number_of_threads_stays() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_new_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("count", [2, 3])
def test_loading_threads_compute_alone_and_leave_everybody_else_his_threads(count, tmp_path, monkeypatch):
    layout, seen = make_layout(), set[int]()
    blender = filled(decoder("llama"), layout, BlendConfig(ratio=0.3), location=tmp_path)
    watched(blender.store, monkeypatch, lambda layer: seen.add(torch.get_num_threads()))
    torch.set_num_threads(count)
    blender.prefill(layout)
    assert seen == {1}
    assert torch.get_num_threads() == count
    assert in_new_thread(torch.get_num_threads) == count


def test_a_thread_keeps_the_number_it_has_set_whatever_others_set_later():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(set_threads, 2).result()
        torch.set_num_threads(3)
        assert pool.submit(torch.get_num_threads).result() == 2
        assert in_new_thread(torch.get_num_threads) == 3


def test_without_the_runtimes_doors_every_thread_keeps_its_number(monkeypatch):
    assert _numbers(use_one_thread) == [1, 3, 3]
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    assert _numbers(use_one_thread) == [3, 3, 3]


def _numbers(call: Callable[[], None]) -> list[int]:
    """Where new threads begin with three: of one that makes this call, of one that begins after it, of this one."""
    torch.set_num_threads(3)
    calling = in_new_thread(lambda: (call(), torch.get_num_threads())[1])
    return [calling, in_new_thread(torch.get_num_threads), torch.get_num_threads()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs a list of the process's threads")
def test_helpers_of_a_thread_end_on_request_and_begin_again():
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def compute() -> None:
        torch.set_num_threads(4)
        alone, matrix = threads(), torch.ones(1 << 20)
        for _ in range(2):
            matrix.exp()
            assert threads() == alone + 3
            end_helpers()
            assert until_equal(threads, alone)

    in_new_thread(compute)


def until_equal(value: Callable[[], int], wanted: int) -> bool:
    """Whether it is `wanted` within five seconds."""
    end = time.monotonic() + 5
    while value() != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return value() == wanted
