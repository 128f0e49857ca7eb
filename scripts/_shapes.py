"""Decoders with random weights at the shapes of real models, for figures on a machine that has no weights.

What a forward pass, a cache or a copy costs depends on the shapes alone. What a model answers, which rows a selector finds and
what a KV correction is worth do not: nothing of that can be learned here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from blend import Decoder, PromptLayout

STORES = ("memory", "disk", "disk-cold")  # where the caches may lie, in the order in which they are measured
TIERS = ("disk", "far", "hot", "local")  # where throttled storage stands
PREFIX, SUFFIX = 40, 64  # tokens before the first chunk, and of the question with what the chat template puts behind it

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


def random_decoder(name: str, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder of this shape, made where it will compute and in the dtype: there is never a second copy.

    The weights are transformers' own first ones, normal with a deviation of 0.02: attention is neither even nor on one key,
    and nothing overflows. Its fingerprint is what they are made from, since no weights were read.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from blend import Decoder

    logging.set_verbosity_error()  # a machine that has no generation defaults for this model is nothing to warn of
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=dtype)
    return Decoder(model, name=f"{name}, random weights", weights=f"random {name} on {device.type}")


def random_layout(vocabulary: int, tokens: int, chunk_tokens: int) -> PromptLayout:
    """A prompt of random ids with `tokens` of context in chunks; the prefix is the same for all."""
    from blend import PromptLayout

    prefix, suffix = random_ids(vocabulary, PREFIX, 0), random_ids(vocabulary, SUFFIX, 1)
    context = random_ids(vocabulary, tokens, 2)
    chunks = tuple(context[at : at + chunk_tokens] for at in range(0, tokens, chunk_tokens))
    return PromptLayout(prefix, chunks, suffix)


def random_ids(vocabulary: int, count: int, seed: int) -> tuple[int, ...]:
    """Token ids, the same for the same arguments."""
    import torch

    return tuple(torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def free_host_bytes() -> int | None:
    """Memory of this machine that programs can still take; None where that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None


def why_not(name: str, tokens: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why prompts of so many tokens do not fit the device's memory, or None where they do.

    What a GPU machine has of other memory is not asked: some give it out as it is used.
    """
    import torch

    shape = SHAPES[name]
    needed = shape.device_bytes(tokens, dtype.itemsize)
    if device.type == "cuda":
        where, free = "on the GPU", torch.cuda.mem_get_info(device)[0]
    else:
        needed += shape.store_bytes(tokens, dtype.itemsize)
        where, free = "of memory", free_host_bytes() or needed
    return f"needs about {needed / 2**30:.1f} GiB {where}, {free / 2**30:.1f} GiB are free" if needed > free else None
