"""What of a GPU's fast ways works on this machine, tried with a tiny model."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blend.model.decoder import Decoder
from blend.model.device_path import Ways, take_fast_ways, ways_of


def device_ways() -> Ways | None:
    """Which fast ways of this machine's GPU prove themselves with a tiny model; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    decoder = Decoder(model.to("cuda", torch.bfloat16), weights="random")
    take_fast_ways(decoder)
    if decoder.graphs is not None:
        decoder.graphs.capture_next()
    return ways_of(decoder)
