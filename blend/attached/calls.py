"""Calls of a model's `forward` that begin prompts, and how blended rows get into their caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from blend.layout import Tokens
from blend.serve.token_index import LEAST_RUN
from blend.verified import UNCHECKED

if TYPE_CHECKING:
    from transformers import Cache

    from blend.model.cache import KV
    from blend.model.decoder import Decoder
    from blend.prefill.blender import Blend, Blender

_PLAIN = ("attention_mask", "cache_position", "input_ids", "logits_to_keep", "position_ids", "return_dict", "use_cache")
"""Arguments of `forward` that every prompt may have."""
_CACHE = ("cache", "past_key_values")  # the second before transformers 5.24
_WHOLE_LAYER = "DynamicLayer"
_ATTENTION_LAYERS = (
    _WHOLE_LAYER,
    "DynamicSlidingWindowLayer",
    "DummyLayer",
)  # the last: of layers that read others' KV
_LAYERS = (
    *_ATTENTION_LAYERS,
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)


class PromptCall(NamedTuple):
    """A call of `forward` that begins prompts.

    Attributes:
        ids: of each prompt, without padding; without its last token if the model has recurrent layers, whose state cannot go
            back by a row.
        padding: tokens in front of each.
        keep: last rows, which the model computes; those behind the first of them are a draft of the answer.
        cache: empty, the caller's.

    """

    ids: Sequence[Tokens]
    padding: Sequence[int]
    keep: int
    cache: Cache


def prompt_call(blender: Blender[Decoder], args: Sequence[Any], kwargs: Mapping[str, Any]) -> PromptCall | str | None:
    """The prompts that a call of `forward` begins; why they cannot be blended; None if it begins none."""
    cache = next((kwargs[name] for name in _CACHE if kwargs.get(name) is not None), None)
    ids = kwargs.get("input_ids")
    if cache is None or ids is None or args or torch.is_grad_enabled() or not kwargs.get("use_cache", True):
        return None
    if ids.shape[1] < LEAST_RUN or cache.get_seq_length() > 0:
        return None
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids)
    reason = _reason_against(blender, cache, kwargs) or _reason_against_tokens(ids, mask, kwargs.get("position_ids"))
    if reason:
        return reason
    keep = kwargs["logits_to_keep"]
    padding = (mask == 0).sum(dim=1).tolist()
    stop = ids.shape[1] - keep + 1  # what follows is a draft of the answer, of which all logits are asked for
    if blender.decoder.recurrent:
        stop -= 1
    prompts = [tuple(row[first:stop]) for row, first in zip(ids.tolist(), padding, strict=True)]
    return PromptCall(prompts, padding, keep, cache)


def _reason_against(blender: Blender[Decoder], cache: Any, kwargs: Mapping[str, Any]) -> str:
    """Why the rows of a call cannot come from a cache of ours, or ""."""
    keep = kwargs.get("logits_to_keep")
    if not isinstance(keep, int) or not 0 < keep < kwargs["input_ids"].shape[1]:
        return "the logits of all rows are asked for"
    if not _is_dynamic(cache):
        return f"a {type(cache).__name__} of this kind cannot be filled"
    given = (name for name, value in kwargs.items() if value is not None and value is not False)
    special = next((name for name in given if name not in (*_PLAIN, *_CACHE)), "")
    if special:
        return f"the prompt has {special}"
    return _reason_against_recurrent(blender, kwargs) if blender.decoder.recurrent else ""


def _reason_against_recurrent(blender: Blender[Decoder], kwargs: Mapping[str, Any]) -> str:
    """Why a call of a model with recurrent layers is left alone, or ""."""
    if not blender.trusted:
        return UNCHECKED
    if kwargs["input_ids"].shape[0] > 1 or kwargs["logits_to_keep"] > 1:
        return "the model has recurrent layers, and the call several prompts or a draft"
    return ""


def _reason_against_tokens(ids: Tensor, mask: Any, positions: Tensor | None) -> str:
    """Why these token ids `[prompts, tokens]` are no plain prompts, or "". mask: 0 for padding."""
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return "the prompt has an attention mask of its own"
    if bool((mask.diff(dim=1) < 0).any()):
        return "the prompt is padded on the right"
    if positions is not None and not _are_plain(positions, mask.cumsum(dim=1) - 1, mask != 0):
        return "the prompt has positions of its own"
    return ""


def _are_plain(positions: Tensor, expected: Tensor, real: Tensor) -> bool:
    """Whether positions count a prompt's tokens, `[prompts, tokens]`. real: which tokens are no padding."""
    if positions.shape == (1, expected.shape[1]):  # of one prompt for all
        positions = positions.expand_as(expected)
    return positions.shape == expected.shape and bool((positions == expected)[real].all())


def _is_dynamic(cache: Any) -> bool:
    """Whether it is a cache that grows in memory, as `generate` makes it by default."""
    from transformers import DynamicCache

    is_plain = type(cache) is DynamicCache and not cache.offloading
    return is_plain and all(type(layer).__name__ in _LAYERS for layer in cache.layers)


def fill(call: PromptCall, blends: Mapping[Tokens, Blend[Decoder]]) -> None:
    """Put all rows but the last into the caller's cache. Rows of padding are 0, and masked."""
    first = blends[call.ids[0]]
    if first.decoder.recurrent:
        call.cache.layers = first.decoder.native_cache(first.cache).layers
        return
    rows = max(len(ids) + first for ids, first in zip(call.ids, call.padding, strict=True)) - 1
    caches = [blends[ids].cache for ids in call.ids]
    for index in range(len(caches[0].layers)):
        parts = [_padded(cache.view(index), first, rows) for cache, first in zip(caches, call.padding, strict=True)]
        if len(parts) == 1:
            keys, values = parts[0]
        else:
            keys, values = (torch.cat(states) for states in zip(*parts, strict=True))
        _put(call.cache, index, keys, values)


def _put(cache: Cache, index: int, keys: Tensor, values: Tensor) -> None:
    """Make these the first rows of a layer, `[prompts, kv_heads, rows, head_dim]`.

    A layer that keeps all rows takes the tensors as they are: its `update` would copy them, behind none. It never writes into
    what it has.
    """
    layer = cache.layers[index] if index < len(cache.layers) else None
    if layer is not None and type(layer).__name__ == _WHOLE_LAYER:
        layer.lazy_initialization(keys, values)
        layer.keys = keys
        layer.values = values
    else:
        cache.update(keys, values, index)


def _padded(states: KV, first: int, rows: int) -> KV:
    """Keys and values `[1, kv_heads, rows, head_dim]` of a prompt that begins at row `first`."""
    keys, values = (part[:, :, : rows - first] for part in states)
    if first:
        keys, values = (torch.nn.functional.pad(part, (0, 0, first, 0)) for part in (keys, values))
    return keys, values


def last_rows(kwargs: Mapping[str, Any], keep: int) -> dict[str, Any]:
    """The arguments of a call for the last rows alone. The mask stays that of all rows."""
    shortened = dict(kwargs)
    for name in ("input_ids", "position_ids", "cache_position"):
        if kwargs.get(name) is not None:
            shortened[name] = kwargs[name][..., -keep:]
    return shortened
