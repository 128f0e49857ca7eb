"""Whether vLLM's own model can recompute rows in a worker, measured with a probe, and the name of its caches."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from blend.integrations.vllm.contract import Site
from blend.integrations.vllm.decoder import PagedDecoder
from blend.integrations.vllm.row_model import PromptRows, RowModel, RowPass, frequencies
from blend.model.admission import PROBE_DELTA, find_turn, probe_ids, tolerance
from blend.model.cache import KV, LayerRotation, Run
from blend.model.fingerprint import files_fingerprint
from blend.model.passes import RowRequest

if TYPE_CHECKING:
    from blend_kernels import Turn


def fingerprints(config: Any) -> tuple[str, str]:
    """Names of a model's caches: shared with transformers, and vLLM's own. Raises `ValueError` for weights that are no files.

    vLLM may run the weights quantised or with another rotation. Where it is configured to, nothing is shared. Otherwise the
    shared name is used if the store holds a probe of the model and vLLM gives the same KV (`blend.chunks.encode`).
    """
    model = config.model_config
    files = files_fingerprint(model.model)
    if files is None:
        raise ValueError(
            f"because the weights of {model.model} are not all files of this machine, so its caches have no name"
        )
    dummy = config.load_config.load_format == "dummy" and "dummy weights"
    # Options tell what vLLM quantises as it loads: the name may be "online" for all of them.
    changes = [
        option for option in (model.quantization, model.quantization_config, model.hf_overrides, dummy) if option
    ]
    vllm_name = sha256(f"vllm\n{files}\n{changes!r}".encode()).hexdigest()[:32]
    return vllm_name if changes else files, vllm_name


def rows_refused(site: Site) -> str:
    """Why rows cannot be run on this worker, beyond `contract.refuse`, as words behind "because"; "" where they can."""
    config = site.config
    layers = site.layers
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        return "engines of a model with experts compute in step"
    if config.model_config.is_multimodal_model:
        return "it reads more than text"
    from vllm.model_executor.layers.attention import Attention

    if not all(type(layer) is Attention for layer in layers):
        return "its attention keeps something else than keys and values"
    specs = [layer.get_kv_cache_spec(config) for layer in layers]
    reasons = {
        "layers share caches": any(layer.kv_sharing_target_layer_name is not None for layer in layers),
        "its layers do not cache alike": any(spec != specs[0] for spec in specs),
        "its attention has sinks": any(layer.has_sink for layer in layers),
        "its attention has position biases": any(
            getattr(layer.impl, "alibi_slopes", None) is not None for layer in layers
        ),
        "its blocks are cut by the attention backend": specs[0].block_size != site.block_size,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def admitted(model: RowModel, fingerprint: str) -> PagedDecoder:
    """The worker's model as a decoder, tried out. Raises `ValueError`, in one line, where its keys or rows cannot be moved."""
    config = model.site.config.model_config
    ids = probe_ids(int(config.get_vocab_size())).to(model.site.device)
    here, logits = _whole(model, ids, 0)
    there, _ = _whole(model, ids, PROBE_DELTA)
    # A quantised model may round an activation the other way, which is off by as much as half precision is.
    most = tolerance(torch.bfloat16 if config.quantization else config.dtype)
    kept_as = str(config.dtype).removeprefix("torch.")
    decoder = PagedDecoder(model, fingerprint, kept_as, _rotations(model, here, there, most))
    _check_rows(decoder, ids, logits, most)
    return decoder


def _whole(model: RowModel, ids: torch.Tensor, start: int) -> tuple[list[KV], torch.Tensor]:
    """A prompt as one sequence, as vLLM runs it: KV of its layers at positions `start...`, logits of its last row."""
    rows = torch.arange(ids.shape[1], device=ids.device)
    layers: list[KV] = []
    blocks = tuple(range(-(-ids.shape[1] // model.site.block_size)))

    def observe(
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        keys = key.transpose(0, 1)[None].clone()
        values = value.transpose(0, 1)[None].clone()
        layers.append((keys, values))

    prompt = PromptRows(rows, blocks)
    hidden = model.run(RowPass(ids[0], (prompt,), scratch=len(blocks), shift=start), observe)
    assert hidden is not None
    return layers, model.logits(hidden[-1:])


def _rotations(
    model: RowModel,
    here: list[KV],
    there: list[KV],
    most: float,
) -> tuple[LayerRotation, ...]:
    known_frequencies = frequencies(model.model)
    rotations = []
    for index, pairs in enumerate(zip(here, there, strict=True)):
        turns: list[Turn | None] = []
        shapes: list[tuple[int, int]] = []
        for before, after in zip(*pairs, strict=True):
            turn, error = find_turn(before.float(), after.float(), PROBE_DELTA, known_frequencies)
            if not error <= most:
                raise ValueError(f"because no known rotation moves the KV of layer {index} to another position")
            turns.append(turn)
            shapes.append((before.shape[1], before.shape[3]))
        rotations.append(LayerRotation(turns[0], turns[1], shapes[0], shapes[1]))
    return tuple(rotations)


def _check_rows(
    decoder: PagedDecoder,
    ids: torch.Tensor,
    logits: torch.Tensor,
    most: float,
) -> None:
    """Compare scattered rows over exact KV, in scratch memory, with the same tokens as one sequence."""
    total = ids.shape[1]
    rows = torch.tensor([1, 2, total // 2, total - 1], device=ids.device)
    cache = decoder.new_cache(total)
    decoder.encode_rows(ids, 0, cache)
    row_logits = decoder.logits(RowRequest(ids[:, rows], Run.read(rows), cache))
    largest = logits.abs().amax().clamp_min(1e-6)
    difference = ((row_logits - logits).abs().amax() / largest).item()
    if not difference <= most:
        raise ValueError(f"because rows run apart differ from its own forward pass by {difference:.1%}")
