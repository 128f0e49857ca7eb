"""Linear layers over few rows on a CPU, not multiplied as torch does by itself.

MKL, which torch calls, packs the second factor of a product before it multiplies. In x W^T that is the weight: for few rows,
rearranging all of it takes longer than the arithmetic. For up to `BY_COLUMNS` rows (W x^T)^T is quicker, which packs x; from
there on oneDNN, which multiplies by the weights as they lie. Milliseconds of all linear layers of Qwen2.5-0.5B, 24 layers and
its LM head (151,936 rows) in float32 on one core with AVX2 (AMD EPYC), weights out of memory:

    rows          2          4          5          8         12         16         20         28         40         72
    x W^T     219 +  93  265 + 133  275 + 134  316 + 148  318 + 153  385 + 178  455 + 224  430 + 212  603 + 300  1040 + 496
    (W x^T)^T 160 +  62  154 +  59  193 +  73  301 + 108  437 + 205  342 + 165  515 + 232  580 + 263  664 + 282  1027 + 487
    oneDNN    208 +  75  226 +  84  235 +  78  272 +  99  290 + 103  344 + 123  394 + 147  458 + 158  619 + 248   978 + 387

From about 100 rows on there is no difference; for a single row torch calls another routine. Few rows are what the pass of the
question consists of that chooses rows, plain reuse, and the decoding of several sequences at once.
"""

from __future__ import annotations

from functools import partial

import torch

MOST_ROWS = 128
BY_COLUMNS = 5

_LINEAR = (
    "_linear_pointwise"  # private in torch, whose compiler calls it; where it is gone, rows are multiplied as many are
)


def worth_it(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a forward pass over so many rows gains from `FewRows`, which knows no gradients."""
    if not 1 < rows <= MOST_ROWS or device.type != "cpu" or dtype != torch.float32:
        return False
    return not torch.is_grad_enabled() and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


class FewRows:
    """Inside, the plain linear layers of a model multiply in one of the other ways; sums are rounded in another order.

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
    few = 1 < rows <= MOST_ROWS and x.dtype == weight.dtype
    if few and rows <= BY_COLUMNS:
        return _by_columns(x, rows, weight, bias)
    if few and hasattr(torch.ops.mkldnn, _LINEAR):
        out: torch.Tensor = getattr(torch.ops.mkldnn, _LINEAR)(x, weight, bias, "none", [], "")
        return out
    return torch.nn.functional.linear(x, weight, bias)


def _by_columns(x: torch.Tensor, rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = (weight @ x.reshape(rows, -1).t()).t()
    # Contiguous as any linear layer's output; the sum makes it so by itself.
    out = out.contiguous() if bias is None else torch.add(out, bias, out=x.new_empty(out.shape))
    return out.view(*x.shape[:-1], weight.shape[0])
