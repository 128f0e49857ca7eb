"""Decoders with random weights at the shapes of real models: what a pass, a cache or a copy costs depends on these alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from blend import Decoder, PromptLayout

LONGEST = 1 << 18  # longer than any prompt here: a model's position limit plays no part in its cost
PREFIX, SUFFIX = 40, 64  # tokens before the first chunk, and of the question with the end of the chat template
_LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_QWEN25 = {"rope_type": "default", "rope_theta": 1e6}


@dataclass(frozen=True)
class Shape:
    """The sizes in transformers' configuration of a model. family: the class is `<family>Config`."""

    family: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool

    def config(self) -> Any:
        """Transformers' configuration, with every token id of the vocabulary an ordinary one."""
        import transformers

        sizes = {name: value for name, value in asdict(self).items() if name != "family"}
        if self.family == "Qwen2":  # which has no such entry: hidden_size / heads
            sizes.pop("head_dim")
        rope = dict(_LLAMA31 if self.family == "Llama" else _QWEN25)
        ordinary = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = getattr(transformers, f"{self.family}Config")
        return config(**sizes, max_position_embeddings=LONGEST, rope_parameters=rope, **ordinary)


SHAPES = {
    "tiny": Shape("Llama", 3, 64, 4, 2, 16, 96, 512, False),
    "0.5B": Shape("Qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),  # Qwen2.5-0.5B
    "1.5B": Shape("Qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),  # Qwen2.5-1.5B
    "8B": Shape("Llama", 32, 4096, 32, 8, 128, 14336, 128256, False),  # Llama-3.1-8B
    # One of 8 tensor-parallel parts of Llama-3.1-70B.
    "70B-shard": Shape("Llama", 80, 8192, 8, 1, 128, 3584, 16032, False),
}


def random_decoder(name: str, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder of this shape with transformers' initial weights, made on its device and in its dtype."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from blend import Decoder
    from blend.model.cpu import packed, replace_linear
    from blend.model.device_path import take_fast_ways

    logging.set_verbosity_error()  # missing generation defaults are nothing to warn of
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=dtype)
    if device.type == "cpu":
        replace_linear(model, packed)  # as `Decoder.load` does
    decoder = Decoder(model, name=f"{name}, random weights", weights=f"random {name} on {device.type}")
    take_fast_ways(decoder)
    return decoder


def random_layout(vocabulary: int, tokens: int, chunk_tokens: int) -> PromptLayout:
    """A prompt of random ids with `tokens` of context in chunks; the prefix is the same for all."""
    from blend import PromptLayout

    prefix, suffix = random_ids(vocabulary, PREFIX, 0), random_ids(vocabulary, SUFFIX, 1)
    context = random_ids(vocabulary, tokens, 2)
    chunks = [context[at : at + chunk_tokens] for at in range(0, tokens, chunk_tokens)]
    return PromptLayout.of_chunks(prefix, chunks, suffix)


def random_ids(vocabulary: int, count: int, seed: int) -> tuple[int, ...]:
    """Token ids, the same for the same arguments."""
    import torch

    return tuple(torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist())
