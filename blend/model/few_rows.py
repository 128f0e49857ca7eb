"""Linear layers over few rows on a CPU, computed the other way round.

MKL packs the second factor of a product before it multiplies. In x W^T that is the weight: for few rows, rearranging all of it
takes longer than the arithmetic. In (W x^T)^T it is x. Measured on one AVX-512 core over a layer of Qwen2.5-0.5B in float32:
8 rows 17.8 -> 10.9 ms, 45 rows 27.4 -> 19.5 ms, 64 rows 34.6 -> 24.9 ms; from about 100 rows on there is no difference, and
for a single row torch calls another routine. It is what the pass of the question consists of that chooses rows, plain reuse,
and the decoding of several sequences at once.
"""

from __future__ import annotations

from functools import partial

import torch

MOST_ROWS = 80


def worth_it(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a forward pass over so many rows gains from `FewRows`."""
    if not 1 < rows <= MOST_ROWS or device.type != "cpu" or dtype != torch.float32:
        return False
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


class FewRows:
    """Inside, the plain linear layers of a model multiply the other way round; sums are rounded in another order.

    Layers of another kind, and those whose `forward` somebody has replaced, stay as they are. One thread at a time.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
        self._turned: list[list[torch.nn.Linear]] = []

    def __enter__(self) -> None:
        self._turned.append([layer for layer in self._layers if "forward" not in vars(layer)])
        for layer in self._turned[-1]:
            vars(layer)["forward"] = partial(_forward, layer)

    def __exit__(self, *exception: object) -> None:
        for layer in self._turned.pop():
            vars(layer).pop("forward", None)


def _forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    rows, weight, bias = x.numel() // max(1, x.shape[-1]), layer.weight, layer.bias
    if not 1 < rows <= MOST_ROWS or x.dtype != weight.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    out = (weight @ x.reshape(rows, -1).t()).t()
    # Contiguous as any linear layer's output; the sum makes it so by itself.
    out = out.contiguous() if bias is None else torch.add(out, bias, out=x.new_empty(out.shape))
    return out.view(*x.shape[:-1], weight.shape[0])
