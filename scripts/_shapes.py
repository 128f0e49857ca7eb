"""Decoders with random weights at the shapes of real models, for figures on a machine that has no weights.

What a forward pass, a cache or a copy costs depends on the shapes alone. Answers, the rows that a selector finds and what a KV
correction gains do not: random weights say nothing of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
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
        made = getattr(transformers, f"{self.family}Config")
        return made(**sizes, max_position_embeddings=LONGEST, rope_parameters=rope, **ordinary)

    @property
    def parameters(self) -> int:
        """Numbers in the weights, norms and biases apart."""
        heads = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size * (2 - self.tie_word_embeddings)

    @property
    def kv_width(self) -> int:
        """Numbers in a token's keys and values of all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def why_not(self, tokens: int, device: torch.device, itemsize: int) -> str | None:
        """Why prompts of so many tokens do not fit the device's memory, or None where they do.

        Counted are weights, two caches and one layer's states; on a CPU the stored caches too, isolated and contextual.
        """
        import torch

        states = tokens * (3 * self.intermediate_size + 8 * self.hidden_size)
        needed = itemsize * (self.parameters + 2 * tokens * self.kv_width + states)
        if device.type == "cuda":
            where, free = "on the GPU", torch.cuda.mem_get_info(device)[0]
        else:
            needed += 2 * tokens * self.kv_width * itemsize
            where, free = "of memory", free_host_bytes() or needed
        if needed <= free:
            return None
        return f"needs about {needed / 2**30:.1f} GiB {where}, {free / 2**30:.1f} GiB are free"


SHAPES = {
    "tiny": Shape("Llama", 3, 64, 4, 2, 16, 96, 512, False),
    "0.5B": Shape("Qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),  # Qwen2.5-0.5B
    "1.5B": Shape("Qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),  # Qwen2.5-1.5B
    "8B": Shape("Llama", 32, 4096, 32, 8, 128, 14336, 128256, False),  # Llama-3.1-8B
    # One of 8 tensor-parallel parts of Llama-3.1-70B.
    "70B-shard": Shape("Llama", 80, 8192, 8, 1, 128, 3584, 16032, False),
}


def random_decoder(name: str, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder of this shape, made on its device and in its dtype, so that there is never a second copy.

    The weights are transformers' initial ones, normal with a deviation of 0.02: attention is neither even nor on one key,
    and nothing overflows.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from blend import Decoder

    logging.set_verbosity_error()  # missing generation defaults are nothing to warn of
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
