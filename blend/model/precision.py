"""The number formats that a decoder computes in: the fastest dtype of this CPU, measured once, and weights of 8 bits."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from contextlib import suppress
from math import log
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, TypedDict

import torch
from torch import Tensor

from blend.errors import ConfigError
from blend.files import GAINS, LEAST_GAIN, cache_root, keep_value, measured_gains
from blend.model.cpu import packed, replace_linear
from blend.model.outline import layer_configs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = ("native", "int8")
MEASURED_ROWS = (40, 300, 2000)  # a question, the recomputed rows of a prompt, a whole prompt
_MODEL_NAME = re.compile(r"^model name[^:\n]*:(.*)", re.MULTILINE)
_CPU_FORMATS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
_LEAST_WEIGHT = 1 << 18  # numbers; products with smaller matrices cost the same in any format
_MOST_WEIGHT = 1 << 23  # numbers of the matrix that is measured


class NumberFormat(TypedDict):
    """The name of a dtype, and one of `WEIGHTS`."""

    dtype: str
    weights: str


def pick_dtype(dtype: str, device: torch.device, config: Any = None) -> torch.dtype:
    """The dtype that an option names. Raises `ConfigError`.

    "auto" is bfloat16 on a GPU. On a CPU it is the faster one of float32 and bfloat16 for the model with this configuration.
    """
    if dtype == "auto":
        faster = device.type != "cpu" or (config is not None and bfloat16_gain(config) >= LEAST_GAIN)
        return torch.bfloat16 if faster else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def bfloat16_gain(config: Any) -> float:
    """How many times faster this CPU multiplies in bfloat16 than in float32, for a model's sizes.

    config: a configuration of transformers, or anything with `hidden_size` and `intermediate_size`.

    The geometric mean over `MEASURED_ROWS` rows of one product with a matrix of the model's sizes. It takes about a second and
    is remembered in kvblend's cache folder by CPU, threads, torch and sizes. 1 for models too small to gain.
    """
    inner = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layer = layer_configs(inner)[0]
    width = _largest(getattr(layer, "hidden_size", None))
    hidden = _largest(getattr(layer, "intermediate_size", None))
    if width * hidden < _LEAST_WEIGHT:
        return 1.0
    width = min(width, 2048)
    return _remembered(width, min(hidden, _MOST_WEIGHT // width))


def _largest(size: Any) -> int:
    """Of a size, or of a list with one for each layer."""
    return int(max(size) if isinstance(size, list | tuple) else size or 0)


def _remembered(width: int, hidden: int) -> float:
    gains = measured_gains()
    name = f"{_cpu()}, {torch.get_num_threads()} threads, torch {torch.__version__}, packed {width} x {hidden}"
    if name not in gains:
        gains[name] = _measure(width, hidden)
        keep_value(cache_root() / GAINS, name, gains[name])  # where nothing is writable, it is measured at every start
    return gains[name]


def _cpu() -> str:
    """Model and instruction sets of the CPU; virtual machines often hide the model."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        named = _MODEL_NAME.search(text)
        name = named[1].strip() if named else ""
        formats = [feature for feature in _CPU_FORMATS if feature in text]
        return " ".join([name or platform.machine(), *formats])
    return platform.processor() or platform.machine()


@torch.inference_mode()
def _measure(width: int, hidden: int) -> float:
    """The best of three alternating runs in each dtype."""
    dtypes = (torch.float32, torch.bfloat16)
    layers = {}
    for dtype in dtypes:
        linear = torch.nn.Linear(width, hidden, bias=False, dtype=dtype)
        layers[dtype] = packed(linear)
    gains = []
    for rows in MEASURED_ROWS:
        inputs = {dtype: torch.rand(rows, width).to(dtype) for dtype in dtypes}
        seconds: dict[torch.dtype, float] = dict.fromkeys(dtypes, float("inf"))
        for _ in range(3):
            for dtype, layer in layers.items():
                begin = perf_counter()
                layer(inputs[dtype])
                seconds[dtype] = min(seconds[dtype], perf_counter() - begin)
        gain = seconds[torch.float32] / seconds[torch.bfloat16]
        gains.append(log(gain))
    return float(torch.tensor(mean(gains)).exp())


class Int8Linear(torch.nn.Module):
    """A linear layer with weights of 8 bits, multiplied by oneDNN's integer kernels on a CPU with VNNI.

    Weights have one scale for each output channel, inputs one for each row. So a row's output does not depend on other rows.
    Sums are exact in int32; the rest is float32.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        self.out_features, self.in_features = weight.shape
        largest = weight.abs().amax(1)
        self.scales = (largest / 127).clamp_min(1e-12)
        self.bias: Tensor | None = None
        if layer.bias is not None:
            self.bias = layer.bias.detach().float()
        scaled = weight / self.scales[:, None]
        rounded = scaled.round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, [_ROWS_AT_ONCE, self.in_features])
        self.zeros = torch.zeros(self.out_features, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., in_features]`; returns `[..., out_features]` in the dtype of `x`."""
        rows = x.reshape(-1, self.in_features)
        out = torch.empty((rows.shape[0], self.out_features), dtype=x.dtype)
        for start in range(0, rows.shape[0], _ROWS_AT_ONCE):
            piece = slice(start, start + _ROWS_AT_ONCE)
            self._multiply(rows[piece].float(), out[piece])
        return out.view(*x.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        high = rows.amax(1, keepdim=True)
        low = rows.amin(1, keepdim=True)
        most = torch.maximum(high, -low)
        scale = (most / 127).clamp_min_(1e-12)
        # The kernels take unsigned inputs: 128 more, which flips the highest bit.
        rounded = (rows * scale.reciprocal()).round_().to(torch.int8)
        whole = rounded.view(torch.uint8).bitwise_xor_(128)
        sums = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        if self.bias is None:
            torch.mul(sums, scale, out=out)
        else:
            torch.addcmul(self.bias, sums, scale, out=out)


_ROWS_AT_ONCE = 512  # their numbers stay in the processor's cache


def check_weights(weights: str, device: torch.device) -> None:
    """Raise `ConfigError` for an unknown format of weights, and for weights of 8 bits where they would not be faster."""
    if weights not in WEIGHTS:
        raise ConfigError(f"unknown weights {weights!r}; choose {' or '.join(WEIGHTS)}")
    if weights == "native":
        return
    if device.type != "cpu":
        raise ConfigError("weights of 8 bits are for CPUs; leave --weights (or KVBLEND_WEIGHTS) out on a GPU")
    if not hasattr(torch.ops.onednn, "qlinear_pointwise") or not has_vnni():
        raise ConfigError(
            "weights of 8 bits need a processor with VNNI instructions; leave --weights (or KVBLEND_WEIGHTS) out here"
        )


def quantize_linear(model: torch.nn.Module) -> None:
    """Give all plain linear layers of a model weights of 8 bits."""
    replace_linear(model, Int8Linear)


def weights_format(model: torch.nn.Module) -> str:
    """One of `WEIGHTS`."""
    return "int8" if any(isinstance(layer, Int8Linear) for layer in model.modules()) else "native"


def has_vnni() -> bool:
    """Whether this processor multiplies integers of 8 bits without overflow."""
    is_supported: Callable[[], bool] | None = getattr(torch.cpu, "_is_vnni_supported", None)
    return is_supported is not None and is_supported()
