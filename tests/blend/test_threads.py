"""Threads beside the model's must not make helpers of their own: with more threads than cores all of them go to sleep."""

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cache_chunks, make_layout
from models import decoder

from blend.config import BlendConfig
from blend.model.cpu import end_helpers, use_one_thread
from blend.prefill.blender import Blender
from blend.store import open_store
from blend.store.reader import ChunkReader


@pytest.mark.parametrize("count", [2, 3])
def test_loading_threads_compute_alone_and_leave_everybody_else_his_threads(count, tmp_path, monkeypatch):
    blender, layout = Blender(decoder("llama"), open_store(tmp_path)), make_layout()
    cache_chunks(blender, layout)
    seen: list[int] = []
    plain = ChunkReader.read_into

    def read_into(self: ChunkReader, *arguments: Any) -> None:
        seen.append(torch.get_num_threads())
        plain(self, *arguments)

    monkeypatch.setattr(ChunkReader, "read_into", read_into)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        blender.prefill(layout, config=BlendConfig(ratio=0.3))
        assert torch.get_num_threads() == count
        new: list[int] = []
        thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert new == [count]
    finally:
        torch.set_num_threads(before)
    assert seen
    assert set(seen) == {1}


def test_without_the_runtimes_doors_every_thread_keeps_its_number(monkeypatch):
    def nothing(place: str | None) -> object:
        raise OSError(place)

    assert _numbers(use_one_thread) == [1, 3, 3]
    monkeypatch.setattr(ctypes, "CDLL", nothing)
    assert _numbers(use_one_thread) == [3, 3, 3]


def _numbers(call: Callable[[], None]) -> list[int]:
    """Where new threads begin with three: of one that makes this call, of one that begins after it, of this one."""
    found: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for before_asking in (call, lambda: None):

            def ask(first: Callable[[], None] = before_asking) -> None:
                first()
                found.append(torch.get_num_threads())

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        return [*found, torch.get_num_threads()]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs a list of the process's threads")
def test_helpers_of_a_thread_end_on_request_and_begin_again():
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def compute() -> None:
        torch.set_num_threads(4)
        alone = threads()
        matrix = torch.ones(1 << 20)
        for _ in range(2):
            matrix.exp()
            most.append(threads() - alone)
            end_helpers()
            least.append(until_equal(threads, alone))

    most, least, before = list[int](), list[bool](), torch.get_num_threads()
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert most == [3, 3]
    assert least == [True, True]


def until_equal(value: Callable[[], int], wanted: int) -> bool:
    """Whether it is `wanted` within five seconds."""
    end = time.monotonic() + 5
    while value() != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return value() == wanted
