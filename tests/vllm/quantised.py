"""A tiny quantised checkpoint, as compressed-tensors lays it out, and a model of transformers that computes the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear
from transformers import Qwen2ForCausalLM

MOST = 63  # a weight's integer: larger ones overflow sums of 16 bits, in which processors without VNNI add up products

_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def save_int8(plain: Path, folder: Path) -> Path:
    """A saved model in W8A8, but for the layer that gives logits: a scale for each output, and for each token."""
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rounded, tensors[f"{name}_scale"] = _rounded(tensors[name], MOST)
        tensors[name] = rounded.to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ACTIVATIONS}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def int8_in_transformers(plain: Path) -> Any:
    """The model as vLLM is to compute it: weights and every token's activations rounded to integers."""
    model = Qwen2ForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for block in model.model.layers:
        for name, module in list(block.named_modules()):
            if isinstance(module, torch.nn.Linear):
                block.set_submodule(name, _Int8Linear(module))
    return model


class _Int8Linear(torch.nn.Module):
    def __init__(self, of: torch.nn.Linear) -> None:
        super().__init__()
        rounded, scale = _rounded(of.weight.data, MOST)
        self.weight, self.bias = torch.nn.Parameter(rounded), of.bias
        self.register_buffer("scale", scale)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        rounded, scale = _rounded(states, 127)
        found = linear(rounded.double(), self.weight.double()).float() * scale * self.scale[:, 0]  # sums of integers
        return found if self.bias is None else found + self.bias


def _rounded(of: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers of at most so much, and the scale of each last dimension."""
    scale = of.abs().amax(-1, keepdim=True) / most
    return (of / scale).round(), scale
