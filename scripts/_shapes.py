"""Decoders with random weights at the shapes of real models, for figures on a machine that has no weights.

What a forward pass, a cache or a copy costs depends on the shapes alone. What a model answers, which rows a selector finds and
what a KV correction is worth do not: nothing of that can be learned here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blend.model.shapes import SHAPES

if TYPE_CHECKING:
    import torch

    from blend import Decoder, PromptLayout

STORES = ("memory", "disk", "disk-cold")  # where the caches may lie, in the order in which they are measured
TIERS = ("disk", "far", "hot", "local")  # where throttled storage stands
PREFIX, SUFFIX = 40, 64  # tokens before the first chunk, and of the question with what the chat template puts behind it


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
