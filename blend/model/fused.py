"""A GPU's fused kernels in place of a model's small modules, for the time of a pass.

HuggingFace computes RMSNorm in six launches, with float32 results between them, and the activation of a gated MLP in two.
`blend_kernels` does each in one. A kernel replaces a module only if it computes the same: both run on random input, in which
no class name counts. They may differ by one rounding, in few places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from blend_kernels import rms_norm, silu_mul

Forward = Callable[..., Any]

_ROWS = 8  # of random input
# Of random input: where the epsilon of a norm decides, where it does not matter, and where a clamp would show.
_SIZES = (1e-3, 1.0, 10.0)
_DIFFERENT = 0.02  # share of numbers that may be rounded in another way, where float32 is summed in another order
_ROUNDINGS = 64  # of float32: it is summed in another order, and the kernel's exponential is less exact
_FORMULAS = ((False, True), (False, False), (True, False))  # plus_one and rounds_first of `rms_norm`


class FusedModules:
    """Kernels in place of the `forward` of modules.

    Args:
        forwards: what to call instead, with the module's arguments.

    Attributes:
        count: how many modules they replace.

    """

    def __init__(self, forwards: Iterable[tuple[nn.Module, Forward]] = ()) -> None:
        self._forwards = [(vars(module), forward) for module, forward in forwards]
        self.count = len(self._forwards)

    @classmethod
    @torch.inference_mode()
    def of(cls, layers: nn.Module) -> FusedModules:
        """Those modules within a model's layers that a kernel equals.

        Raises:
            RuntimeError: a kernel differs from its plain-torch twin on this machine, or cannot be compiled.

        """
        forwards = []
        for module in layers.modules():
            if (forward := _fused_norm(module) or _fused_mlp(module)) is not None:
                forwards.append((module, forward))
        return cls(forwards)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the modules whose `forward` is still their own, then put them back."""
        replaced = [(attributes, forward) for attributes, forward in self._forwards if "forward" not in attributes]
        try:
            for attributes, forward in replaced:
                attributes["forward"] = forward
            yield
        finally:
            for attributes, _ in replaced:
                attributes.pop("forward", None)


def _fused_norm(module: nn.Module) -> Forward | None:
    """The kernel's RMSNorm, if the module computes it with any weight."""
    parameters = list(module.named_parameters())
    if len(parameters) != 1 or any(module.children()):
        return None
    name, weight = parameters[0]
    if weight.ndim != 1:
        return None
    generator = torch.Generator(weight.device).manual_seed(1)
    # With a mean, which a LayerNorm would subtract.
    inputs = []
    for size in _SIZES:
        x = _random((_ROWS, len(weight)), weight, generator)
        inputs.append(size * (x + 0.5))
    random_weight = _random(weight.shape, weight, generator)
    replaced = {name: random_weight}
    expected = _results(lambda x: torch.func.functional_call(module, replaced, (x,)), inputs)
    if expected is None:
        return None
    numbers = [number for number in vars(module).values() if isinstance(number, float)]
    for eps, (plus_one, rounds_first) in product(numbers, _FORMULAS):
        options: dict[str, Any] = {"eps": eps, "plus_one": plus_one, "rounds_first": rounds_first}
        twin = [rms_norm(x, random_weight, backend="torch", **options) for x in inputs]
        if _equal(twin, expected):
            kernel = [rms_norm(x, random_weight, **options) for x in inputs]
            _require_equal(kernel, twin, "RMSNorm")
            return _guarded(module, weight.dtype, lambda x: rms_norm(x, getattr(module, name), **options))  # noqa: B023
    return None


def _fused_mlp(module: nn.Module) -> Forward | None:
    """The gated MLP with the kernel's activation, if the module computes it with linear layers of the usual names."""
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if len(linear) < len(layers):
        return None
    gate, up, down = linear
    weight = gate.weight
    generator = torch.Generator(weight.device).manual_seed(1)
    inputs = [size * _random((1, _ROWS, gate.in_features), weight, generator) for size in _SIZES]
    expected = _results(module, inputs)
    pairs = [(gate(x), up(x)) for x in inputs]
    twin = [silu_mul(*pair, backend="torch") for pair in pairs]
    if expected is None or not _equal([down(x) for x in twin], expected):
        return None
    _require_equal([silu_mul(*pair) for pair in pairs], twin, "the gated activation")
    return _guarded(module, weight.dtype, lambda x: down(silu_mul(gate(x), up(x))))


def _guarded(module: nn.Module, dtype: torch.dtype, fused: Forward) -> Forward:
    """The fused computation for the input that it was compared on; the module's own for any other."""
    native = type(module).forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dtype != dtype:
            return native(module, x, *args, **kwargs)
        return fused(x)

    return forward


def _random(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    numbers = torch.randn(shape, generator=generator, device=like.device)
    return numbers.to(like.dtype)


def _results(call: Forward, inputs: list[Tensor]) -> list[Tensor] | None:
    """The results for these inputs; None if the module takes others, or gives anything else than tensors."""
    with suppress(TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        results = [call(x) for x in inputs]
        return results if all(isinstance(result, Tensor) for result in results) else None
    return None


def _require_equal(kernel: list[Tensor], twin: list[Tensor], name: str) -> None:
    if not _equal(kernel, twin):
        raise RuntimeError(f"the kernel of {name} differs from plain torch")


def _equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether results are finite, not all zero, and equal up to one rounding, nearly everywhere exactly."""
    return all(map(_are_equal, actual, expected))


def _are_equal(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.any() or not expected.isfinite().all():
        return False
    error = (actual.float() - expected.float()).abs()
    kind = torch.finfo(expected.dtype)
    smallest_float32 = torch.finfo(torch.float32).smallest_normal
    smallest = max(kind.eps * kind.smallest_normal, smallest_float32)
    rounding = kind.eps * expected.float().abs()
    if expected.dtype == torch.float32:
        return not (error > _ROUNDINGS * rounding + smallest).any()
    different = (error > 0).float().mean()
    return not (error > rounding + smallest).any() and bool(different <= _DIFFERENT)
