"""Launches of the ops, recorded instead of run, and compiled as Triton's JIT would for a GPU that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_OPTIONS = ("num_warps", "num_stages", "maxnreg", "num_ctas", "enable_fp_fusion")
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Launch(NamedTuple):
    """One launch: the jit function, its arguments by name, and its compile options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


class Resources(NamedTuple):
    """What one compiled variant takes: registers per thread, bytes spilled per thread, bytes of shared memory per block."""

    registers: int
    spills: int
    shared: int


@contextmanager
def record(*kernels: Any) -> Iterator[list[Launch]]:
    """Within the context, launches of these jit functions are noted in the list instead of run."""
    notes: list[Launch] = []

    def note(kernel: Any) -> Any:
        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
            names = [parameter.name for parameter in kernel.params]
            notes.append(Launch(kernel, {**dict(zip(names, args, strict=False)), **kwargs}, options))

        return run

    with ExitStack() as patches:
        for kernel in kernels:
            patches.enter_context(patch.object(kernel, "run", note(kernel)))
        yield notes


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile for `capability` (80, 90, 100) and measure; raises whatever Triton raises for code that it cannot compile."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind, aligned = _kind(value, parameter)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, spills = _usage(binary.asm["cubin"])
    return Resources(registers, spills, int(binary.metadata.shared))


def _kind(value: Any, parameter: Any) -> tuple[str, bool]:
    """Triton's type of an argument, and whether it is a multiple of 16, as its JIT specialises it."""
    if parameter.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}", True
    if hasattr(value, "block_shape"):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>", False
    if isinstance(value, int):
        if value == 1 and not parameter.do_not_specialize:
            return "constexpr", False
        return "i32" if abs(value) < 1 << 31 else "i64", value % 16 == 0 and not parameter.do_not_specialize
    return "fp32", False


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of the one kernel in a binary, from cuobjdump's resource table."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]
