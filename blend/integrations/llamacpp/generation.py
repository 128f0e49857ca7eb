"""A model for `model.generate` that computes nothing: kvblend hands it the logits."""

from __future__ import annotations

from typing import Any

import torch

from blend.integrations.llamacpp.model import GGUFModel


def shell_of(model: GGUFModel) -> Any:
    """A model of transformers with the configuration of a GGUF file, and its tokens that end answers."""
    from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

    class Shell(PreTrainedModel, GenerationMixin):  # type: ignore[misc]  # transformers is untyped here
        config_class = type(model.config)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.nothing = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: Any = None, **_: Any) -> Any:
            raise RuntimeError("llama.cpp computes")

    shell = Shell(model.config)
    shell.generation_config = GenerationConfig(
        eos_token_id=model.ends, pad_token_id=model.ends[0] if model.ends else None
    )
    return shell.eval()
