"""The sizes of well-known models, for figures and plans where no weights are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Longer than any prompt here: what the position limit of the real model is plays no part in its cost.
LONGEST = 1 << 18
_LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_QWEN25 = {"rope_type": "default", "rope_theta": 1e6}


@dataclass(frozen=True)
class Shape:
    """What transformers' configuration of a model says about its size. family: the class is `<family>Config`."""

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
        return getattr(transformers, f"{self.family}Config")(
            **sizes,
            max_position_embeddings=LONGEST,
            rope_parameters=dict(_LLAMA31 if self.family == "Llama" else _QWEN25),
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    @property
    def parameters(self) -> int:
        """Numbers in the weights, norms and biases apart."""
        heads = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size * (2 - self.tie_word_embeddings)

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys and values in all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def device_bytes(self, tokens: int, itemsize: int) -> int:
        """About what prefilling so many tokens takes beside the stored caches: weights, two caches, one layer's states."""
        states = tokens * (3 * self.intermediate_size + 8 * self.hidden_size)
        return itemsize * (self.parameters + 2 * tokens * self.kv_width + states)

    def store_bytes(self, tokens: int, itemsize: int) -> int:
        """Of the isolated and the contextual caches of so many tokens."""
        return 2 * tokens * self.kv_width * itemsize


SHAPES = {
    "tiny": Shape("Llama", 3, 64, 4, 2, 16, 96, 512, False),
    "0.5B": Shape("Qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),  # Qwen2.5-0.5B
    "1.5B": Shape("Qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),  # Qwen2.5-1.5B
    "8B": Shape("Llama", 32, 4096, 32, 8, 128, 14336, 128256, False),  # Llama-3.1-8B
    "70B-shard": Shape(
        "Llama", 80, 8192, 8, 1, 128, 3584, 16032, False
    ),  # one of 8 tensor-parallel parts of Llama-3.1-70B
}
