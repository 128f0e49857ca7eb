"""Numbers on their way from the device to the host, so that the host can launch further work before it reads them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A small tensor's copy in host memory. Making it does not wait for the device; on a CPU it is the tensor itself.

    Args:
        tensor: integers, which no later work changes.

    """

    def __init__(self, tensor: Tensor) -> None:
        self._numbers = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    @property
    def ready(self) -> bool:
        """Whether reading it waits for nothing."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[int]:
        """The numbers, in one flat list. Waits until the device has computed them, and for nothing behind them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.flatten().tolist()
