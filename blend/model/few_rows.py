"""Linear layers over few rows on a CPU, computed the other way round.

MKL packs the second factor of a product before it multiplies. In x W^T that is the weight: for few rows, rearranging all of it
takes longer than the arithmetic. In (W x^T)^T it is x. Measured on one AVX-512 core over a layer of Qwen2.5-0.5B in float32:
8 rows 17.8 -> 10.9 ms, 45 rows 27.4 -> 19.5 ms, 64 rows 34.6 -> 24.9 ms; from about 100 rows on there is no difference, and
for a single row torch calls another routine. It is what the pass of the question consists of that chooses rows, plain reuse,
and the decoding of several sequences at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MOST_ROWS = 80


def worth_it(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a forward pass over so many rows gains from `FewRows`."""
    return (
        1 < rows <= MOST_ROWS and device.type == "cpu" and dtype == torch.float32 and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    )


class FewRows(TorchFunctionMode):
    """Inside, `torch.nn.functional.linear` multiplies the other way round; sums are rounded in another order."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Everything else goes on as it is."""
        if func is torch.nn.functional.linear and not kwargs and 2 <= len(args) <= 3:
            return _turned(*args)
        return func(*args, **(kwargs or {}))


def _turned(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if weight.ndim != 2 or not 1 < rows <= MOST_ROWS or x.dtype != weight.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    out = (weight @ x.reshape(rows, -1).t()).t()
    # Contiguous as any linear layer's output; the sum makes it so by itself.
    out = out.contiguous() if bias is None else torch.add(out, bias, out=x.new_empty(out.shape))
    return out.view(*x.shape[:-1], weight.shape[0])
