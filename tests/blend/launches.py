"""Counts what a blended prefill launches on a device, in Triton's interpreter: `python launches.py CHUNKS METHOD`.

Prints a JSON object: for each decoder layer and pass, the launches of kvblend's own, those of the model's modules apart.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

import blend_kernels.attention
import blend_kernels.mass
import blend_kernels.placing
import blend_kernels.rotation
from blend.config import BlendConfig
from tests.blend.test_host_path import filled, prompt
from tests.places import REPOSITORY

_FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::lift_fresh",
    "aten::detach",
    "aten::record_stream",
)
COUNTS: Counter[str] = Counter()


def own() -> bool:
    """Whether kvblend launches this, and not the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if "transformers" in file.parts or (file.name == "launches.py" and frame.f_code.co_name == "passes"):
            return False
        if file.is_relative_to(REPOSITORY / "kernels") or file.is_relative_to(REPOSITORY / "blend"):
            return file.name != "cpu.py"  # linear layers
        frame = frame.f_back
    return False


class Counting(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(_FREE) and not Interpreting.depth and own():
            COUNTS[where(func.name())] += 1
        return func(*args, **(kwargs or {}))


class Interpreting:
    """How many kernels are being interpreted: their own operations are none of the device's."""

    depth = 0


def where(name: str) -> str:
    return f"{STAGE[0]} {name}"


STAGE = [""]


def count_kernels() -> None:
    plain = InterpretedFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        COUNTS[where(f"kernel {self.fn.__name__}")] += 1
        Interpreting.depth += 1
        try:
            return plain(self, *args, **options)
        finally:
            Interpreting.depth -= 1

    InterpretedFunction.run = run  # type: ignore[method-assign]


def main() -> None:
    chunks, method = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    layout = prompt(chunks)
    blender = filled(layout, corrected=True)
    config = BlendConfig("none") if method == "reuse" else BlendConfig("query_guided", ratio=0.1)
    blender.prefill(layout, config=config)
    count_kernels()
    for module in (blend_kernels.placing, blend_kernels.rotation):
        module.choose_backend = lambda *_: "triton"  # type: ignore[attr-defined]
    for module in (blend_kernels.attention, blend_kernels.mass):
        module.choose_attention_backend = lambda *_: "triton"  # type: ignore[attr-defined]
    handles = []
    for index, layer in enumerate(blender.decoder.layers):
        handles.append(layer.register_forward_pre_hook(lambda *_, index=index: STAGE.__setitem__(0, f"layer {index}")))
        handles.append(layer.register_forward_hook(lambda *_: STAGE.__setitem__(0, "")))
    with Counting():
        blender.prefill(layout, config=config)
    sys.stdout.write(json.dumps(COUNTS))


if __name__ == "__main__":
    main()
