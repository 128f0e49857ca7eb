"""Blenders over filled stores, prefills in steps, and checks that many tests make."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import Recorded, cache_of
from dense_reference import LayerKV, assert_close, assert_dense, dense_blend, dense_reuse
from models import decoder
from transformers.cache_utils import Cache, DynamicLayer

from blend.config import BlendConfig
from blend.layout import PromptLayout
from blend.model.cache import BlendedCache, Run
from blend.model.decoder import Decoder
from blend.model.generate import generate
from blend.model.passes import RowRequest, run_steps
from blend.prefill.blender import Blend, Blender
from blend.store import Codec, open_store


class Passage(NamedTuple):
    """A text for a prompt."""

    title: str
    text: str


REUSE = BlendConfig("none", correction=False)


def texts(*lengths: int, seed: int = 0, below: int = 90) -> list[tuple[int, ...]]:
    """Random token ids."""
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, below, (length,), generator=draw).tolist()) for length in lengths]


def empty_blender(name: str = "llama", config: BlendConfig | None = None) -> Blender:
    return Blender(decoder(name), open_store("memory:"), config)


def filled(
    dec: Decoder,
    layout: PromptLayout,
    config: BlendConfig | None = None,
    *,
    location: str | Path = "memory:",
    codec: str | Codec = "native",
) -> Blender:
    """A blender whose store holds the caches of the prompt's chunks."""
    blender = Blender(dec, open_store(location, codec=codec), config)
    library = blender.library(layout.kept_behind)
    library.compute(library.missing([chunk for chunk in layout.stored if chunk is not None]))
    return blender


def prefill_in_steps(blender: Blender, layout: PromptLayout, **options: Any) -> Blend:
    """As a server prefills: every step's rows in a pass of their own."""
    return run_steps(blender.steps(layout, **options), lambda request: blender.decoder.prefill([request]))


def views(cache: BlendedCache) -> list[LayerKV]:
    """Keys and values of every layer."""
    return [cache.view(index) for index in range(len(cache.layers))]


def assert_kv(
    found: Iterable[LayerKV],
    expected: Iterable[LayerKV],
    rows: Any = slice(None),
    compare: Callable[[torch.Tensor, torch.Tensor], object] = assert_close,
) -> None:
    """Keys and values of these rows in every layer."""
    for pair, expected_pair in zip(found, expected, strict=True):
        for part, expected_part in zip(pair, expected_pair, strict=True):
            compare(part[..., rows, :], expected_part[..., rows, :])


def assert_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected)


def context_error(blender: Blender, layout: PromptLayout, *, corrected: bool) -> float:
    """Squared distance of the context's reused KV from full recompute, over layers, relative to its size in each."""
    configs = (BlendConfig("none", correction=corrected), BlendConfig("all"))
    reused, true = (cache_of(blender.prefill(layout, config=config)) for config in configs)
    stale, total = slice(layout.chunk_spans[0].stop, layout.context.stop), 0.0
    for pair, true_pair in zip(reused, true, strict=True):
        for part, true_part in zip(pair, true_pair, strict=True):
            distance = (part - true_part)[:, :, stale].square().sum()
            total += float(distance / true_part[:, :, stale].square().sum())
    return total


def transformers_cache(layers: Iterable[LayerKV]) -> Cache:
    """The KV in transformers' own cache, without the last row: `model.generate` computes it again."""
    copies = []
    for keys, values in layers:
        copies.append(DynamicLayer())
        copies[-1].update(keys[:, :, :-1].clone(), values[:, :, :-1].clone())
    return Cache(layers=copies)


def assert_dense_blend(model: Any, prefill: Recorded, tolerance: float | None = None) -> None:
    """The blend is the dense reference that recomputes exactly the rows of each layer."""
    layout = prefill.blend.layout
    reused = dense_reuse(model, layout.prefix, layout.chunks, len(layout.suffix))
    dense = dense_blend(model, layout.token_ids, reused, prefill.rows_by_layer)
    assert_dense(prefill.blend.logits, cache_of(prefill.blend), dense, tolerance)


def consecutive(ids: torch.Tensor, start: int, cache: BlendedCache, **options: Any) -> RowRequest:
    """Rows `[1, rows]` that follow each other."""
    return RowRequest(ids, Run.consecutive(start, start + ids.shape[1], ids.device), cache, **options)


def greedy(blend: Blend, count: int, **options: Any) -> tuple[int, ...]:
    """What kvblend writes behind the prompt; no stop, so that it is `count` tokens."""
    options = {"max_new_tokens": count, "eos_token_id": None, **options}
    return generate(blend.decoder, blend, blend.layout.token_ids, **options).token_ids


def greedy_by_transformers(dec: Decoder, ids: Sequence[int], count: int, **options: Any) -> tuple[int, ...]:
    """What the model's own `generate` writes behind these tokens, as many."""
    tokens = torch.tensor([ids])
    sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    options = {"attention_mask": torch.ones_like(tokens), "eos_token_id": None, **sampling, **options}
    written = dec.model.generate(tokens, max_new_tokens=count, **options)
    return tuple(written[0, len(ids) :].tolist())


@contextmanager
def refused(error: type[Exception], words: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Refused in one line that matches these words."""
    with pytest.raises(error, match=words) as caught:
        yield caught
    assert "\n" not in str(caught.value)


Counts = dict[str, list[int]]


@contextmanager
def counted_rows(dec: Decoder) -> Iterator[Counts]:
    """Rows of every call of every linear layer and norm, by the module's name: `3.mlp.down_proj`, `head`, `embed`."""
    counts: Counts = defaultdict(list)

    named = {"head": dec.model.get_output_embeddings(), "embed": dec.model.get_input_embeddings()}
    for name, module in dec.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            named[name] = module
    with ExitStack() as stack:
        for name, module in named.items():
            seen = counts[name]
            hook = module.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out.shape[:2].numel()))
            stack.enter_context(hook)
        yield counts
