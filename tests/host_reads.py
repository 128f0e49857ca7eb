"""Tensors that refuse to give their values to the host, for tests of code that must not wait for a device."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from places import REPOSITORY
from torch.utils._python_dispatch import TorchDispatchMode

from blend.prefill.prefill import Prefill
from blend.serve.engine.decoding import HostCopy

READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
ALLOWED: tuple[CodeType, ...] = (Prefill.read_result.__code__, HostCopy.read.__code__)


class Refusing(TorchDispatchMode):
    """Refuses operations whose result has a size that depends on values."""

    NAMES = (
        *("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::equal"),
        *("aten::bincount", "aten::_local_scalar_dense"),
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func.name().startswith("aten::index.") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if (masks or func.name().startswith(self.NAMES)) and asked_by_the_engine():
            raise AssertionError(f"{func.name()} waits for the device")
        return func(*args, **(kwargs or {}))


def asked_by_the_engine() -> bool:
    """Whether `blend` asked, and not the model, the plain twins of kernels, or the reads at a pass's end."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(REPOSITORY / "kernels") or "transformers" in file.parts:
            return False
        if file.is_relative_to(REPOSITORY / "blend"):
            return frame.f_code not in ALLOWED
        frame = frame.f_back
    return False


@contextmanager
def refused_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors do not give their values to the host."""
    with monkeypatch.context() as patch:
        for name in READS:
            plain = getattr(torch.Tensor, name)

            def read(self: torch.Tensor, *args: Any, plain: Any = plain, name: str = name, **options: Any) -> Any:
                assert not asked_by_the_engine(), f"{name} waits for the device"
                return plain(self, *args, **options)

            patch.setattr(torch.Tensor, name, read)
        with Refusing():
            yield
