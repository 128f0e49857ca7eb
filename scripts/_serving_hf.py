"""Tokens per second of a plain HuggingFace decode step over batches, in a process of its own: the measure of `blend serve`.

Called as `_serving_hf.py MODEL CONTEXT STEPS BATCH...`; prints one JSON object, batch -> tokens per second.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any


def measure(model: Any, context: int, steps: int, batch: int) -> float:
    """Median over the steps, in tokens per second of the whole batch.

    One prompt is prefilled and its cache repeated: what a step costs does not depend on what the tokens are. Every sequence
    then takes the likeliest next token, as greedy decoding does.
    """
    import torch

    from blend.model.cache import cache_argument, output_cache

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, context), generator=generator)
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1)
        cache, token = output_cache(out), out.logits[:, -1:].argmax(-1).repeat(batch, 1)
        cache.batch_repeat_interleave(batch)
        taken = []
        for _ in range(steps + 2):  # the first two warm up
            begin = time.perf_counter()
            token = model(token, use_cache=True, **{cache_argument(model): cache}).logits[:, -1:].argmax(-1)
            taken.append(time.perf_counter() - begin)
    return batch / median(taken[2:])


def main() -> None:
    """Load the model once, measure every batch."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, context, steps, *batches = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rates = {batch: measure(model, int(context), int(steps), int(batch)) for batch in batches}
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
