"""Counts what blended prefills launch on a device besides the model's modules; Triton's interpreter stands in for it.

Prints a JSON list of three prefills: plain reuse of 4 chunks, and 10 % of the rows of 4 and of 16 chunks. Each is an object
that says for every decoder layer how often what is launched.
"""

import json
import os
import sys
from collections import Counter, defaultdict
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
from blend.config import BlendConfig
from blend.layout import PromptLayout
from blend.prefill.blender import Blender
from tests.blend.test_host_path import corrected, prompt
from tests.places import REPOSITORY

_FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::lift_fresh",
    "aten::detach",
    "aten::record_stream",
    "aten::is_pinned",
    "aten::promote_types",
)
REUSE, ROWS = BlendConfig("none"), BlendConfig("query_guided", ratio=0.1)


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


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.stage = "outside"
        self.interpreting = 0  # kernels: their own operations are none of the device's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(_FREE) and not self.interpreting and own():
            self.counts[self.stage][func.name()] += 1
        return func(*args, **(kwargs or {}))

    def of_a_prefill(self, blender: Blender, layout: PromptLayout, config: BlendConfig) -> dict[str, Counter[str]]:
        self.counts.clear()
        with self:
            blender.prefill(layout, config=config)
        return dict(self.counts)


LAUNCHES = Launches()
_RUN = InterpretedFunction.run


def run_counted(kernel: Any, *args: Any, **options: Any) -> Any:
    LAUNCHES.counts[LAUNCHES.stage][kernel.fn.__name__] += 1
    LAUNCHES.interpreting += 1
    result = _RUN(kernel, *args, **options)
    LAUNCHES.interpreting -= 1
    return result


def main() -> None:
    torch.set_num_threads(1)
    layouts = [prompt(chunks, tokens=64) for chunks in (4, 16)]
    blenders = [corrected(layout) for layout in layouts]
    for blender, layout in zip(blenders, layouts, strict=True):
        blender.prefill(layout, config=ROWS)
    InterpretedFunction.run = run_counted  # type: ignore[method-assign]
    blend_kernels.placing.choose_backend = lambda *_: "triton"  # type: ignore[attr-defined]
    for module in (blend_kernels.attention, blend_kernels.mass):
        module.choose_attention_backend = lambda *_: "triton"  # type: ignore[attr-defined]
    for index, layer in enumerate(blenders[0].decoder.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: setattr(LAUNCHES, "stage", f"layer {index}"))
        layer.register_forward_hook(lambda *_: setattr(LAUNCHES, "stage", "outside"))
    prefills = ((0, REUSE), (0, ROWS), (1, ROWS))
    found = [LAUNCHES.of_a_prefill(blenders[which], layouts[which], config) for which, config in prefills]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
