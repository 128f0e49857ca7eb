"""Whether a worker's model can be driven over rows: refusals by configuration, then a measurement, as a decoder is admitted."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from blend.integrations.vllm.contract import Site
from blend.integrations.vllm.rows_batch import PromptRows
from blend.integrations.vllm.rows_decoder import Facts, PagedDecoder
from blend.integrations.vllm.rows_rope import frequencies
from blend.integrations.vllm.rows_worker import RowModel, RowPass
from blend.model.admission import PROBE_DELTA, LayerRotation, Rotation, find_rotation, probe_ids, tolerance
from blend.model.cache import KV
from blend.model.forward import RowRequest


def refusal(site: Site) -> str:
    """Why rows cannot be run on this worker, in words that follow "because"; empty where they can as far as can be told."""
    config, layers = site.config, site.layers
    parallel = config.parallel_config
    otherwise = parallel.data_parallel_size > 1 or parallel.world_size != parallel.tensor_parallel_size
    told = {
        "the model is split over several processes, and not by tensor parallelism alone": otherwise,
        "it serves LoRA adapters": config.lora_config is not None,
        "it decodes speculatively": config.speculative_config is not None,
        "it reads more than text": config.model_config.is_multimodal_model,
        "its attention keeps something else than keys and values": not all(type(one) is Attention for one in layers),
    }
    if found := next((why for why, holds in told.items() if holds), ""):
        return found
    specs = [layer.get_kv_cache_spec(config) for layer in layers]
    told = {
        "its layers do not cache alike": any(one != specs[0] for one in specs),
        "its layers do not keep all tokens": type(specs[0]) is not FullAttentionSpec or _windowed(specs[0]),
        "layers share caches": any(layer.kv_sharing_target_layer_name is not None for layer in layers),
        "its attention has sinks": any(layer.has_sink for layer in layers),
        "its attention has position biases": any(getattr(one.impl, "alibi_slopes", None) is not None for one in layers),
        "its blocks are cut by the attention backend": specs[0].block_size != site.block_size,
        "its heads are not shared out to the processes as vLLM's configuration says": not _split_as_told(site),
    }
    return next((why for why, holds in told.items() if holds), "")


def _windowed(spec: Any) -> bool:
    return spec.sliding_window is not None or spec.attention_chunk_size is not None


def _split_as_told(site: Site) -> bool:
    """Whether every layer has as many heads here as each of the model's processes is to have."""
    model, parallel = site.config.model_config, site.config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return True
    told = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    return all((layer.num_heads, layer.num_kv_heads) == told for layer in site.layers)


def admitted(model: RowModel, facts: Facts) -> PagedDecoder:
    """The worker's model as a decoder. Raises ValueError, in one line, for one whose keys or rows cannot be moved."""
    ids = probe_ids(facts.vocabulary).to(model.site.device)
    here, logits = _whole(model, ids, 0)
    there, _ = _whole(model, ids, PROBE_DELTA)
    most = _most_apart(model.site.config.model_config)
    rotations = _rotations(model, here, there, most)
    decoder = PagedDecoder(model, facts, rotations)
    _check_rows(decoder, ids, logits, most)
    return decoder


def _most_apart(model: Any) -> float:
    """As `tolerance`; an activation that a quantised model rounds the other way is off by as much as in half precision."""
    return tolerance(torch.bfloat16 if model.quantization else model.dtype)


def _whole(model: RowModel, ids: torch.Tensor, start: int) -> tuple[list[KV], torch.Tensor]:
    """A prompt as one sequence, as vLLM runs it: KV of its layers at positions `start...`, logits of its last row."""
    rows, found = torch.arange(ids.shape[1], device=ids.device), list[KV]()
    blocks = tuple(range(-(-ids.shape[1] // model.site.block_size)))

    def see(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        found.append((key.transpose(0, 1)[None].clone(), value.transpose(0, 1)[None].clone()))

    hidden = model.run(RowPass(ids[0], (PromptRows(rows, blocks),), scratch=len(blocks), shift=start), see)
    assert hidden is not None
    return found, model.logits(hidden[-1:])


def _rotations(model: RowModel, here: list[KV], there: list[KV], most: float) -> tuple[LayerRotation, ...]:
    known = frequencies(model.model)
    found = []
    for index, pairs in enumerate(zip(here, there, strict=True)):
        turns, shapes = list[Rotation](), list[tuple[int, int]]()
        for before, after in zip(*pairs, strict=True):
            turn = find_rotation(before.float(), after.float(), PROBE_DELTA, known, most)
            if turn is None:
                raise ValueError(
                    f"because the KV of layer {index} cannot be moved to another position by any known rotation"
                )
            turns.append(turn)
            shapes.append((before.shape[1], before.shape[3]))
        found.append(LayerRotation(turns[0], turns[1], shapes[0], shapes[1]))
    return tuple(found)


def _check_rows(decoder: PagedDecoder, ids: torch.Tensor, logits: torch.Tensor, most: float) -> None:
    """Scattered rows over the exact KV, in scratch memory, against the logits of the same tokens as one sequence."""
    total = ids.shape[1]
    rows = torch.tensor([1, 2, total // 2, total - 1], device=ids.device)
    cache = decoder.new_cache(total)
    decoder.encode_rows(ids, 0, cache)
    found = decoder.logits(RowRequest(ids[:, rows], rows, cache))
    difference = ((found - logits).abs().amax() / logits.abs().amax().clamp_min(1e-6)).item()
    if not difference <= most:
        raise ValueError(f"because rows run apart differ from its own forward pass by {difference:.1%}")
