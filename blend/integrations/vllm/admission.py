"""Whether vLLM's own model can recompute rows in a worker, measured with a probe, and the name of its caches."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from blend.errors import ConfigError
from blend.integrations.vllm.decoder import PagedCache, PagedDecoder
from blend.integrations.vllm.row_model import RowModel, frequencies
from blend.model.admission import PROBE_DELTA, find_turn, probe_ids, tolerance
from blend.model.cache import LayerRotation, Run
from blend.model.fingerprint import files_fingerprint
from blend.model.passes import RowRequest
from blend.types import dtype_name

if TYPE_CHECKING:
    from blend_kernels import Turn


def fingerprints(config: Any) -> tuple[str, str]:
    """Names of a model's caches: shared with transformers, and vLLM's own. Raises `ValueError` for weights that are no files.

    vLLM may run the weights quantised or with another rotation. Where it is configured to, nothing is shared. Otherwise the
    shared name is used if the store holds a probe of the model and vLLM gives the same KV (`blend.chunks.probe`).
    """
    model = config.model_config
    files = files_fingerprint(model.model)
    if files is None:
        raise ValueError(
            f"because the weights of {model.model} are not all files of this machine, so its caches have no name"
        )
    # Options tell what vLLM quantises as it loads: the name may be "online" for all of them.
    options = (
        model.quantization,
        model.quantization_config,
        model.hf_overrides,
        config.load_config.load_format == "dummy",
    )
    changes = list(filter(None, options))
    vllm_name = sha256(f"vllm\n{files}\n{changes!r}".encode()).hexdigest()[:32]
    return vllm_name if changes else files, vllm_name


def admitted(config: Any, names: Iterable[str]) -> tuple[PagedDecoder, str]:
    """The worker's model as a decoder, tried out, its caches under vLLM's own name; and the shared name.

    config: the `VllmConfig`. names: of the layers that have a cache. Raises `ConfigError` where its keys or rows cannot be
    moved.
    """
    try:
        shared_name, vllm_name = fingerprints(config)
        model = RowModel(config, names)
        _check_layers(model)
        return _measured(model, vllm_name), shared_name
    except ValueError as error:
        raise ConfigError(f"vLLM's own model cannot recompute rows, {error}; serve it without the connector") from error


def _check_layers(model: RowModel) -> None:
    """Raise `ValueError` for layers over which rows cannot be run, beyond `contract.refuse`."""
    from vllm.model_executor.layers.attention import Attention

    layers = model.layers
    specs = [layer.get_kv_cache_spec(model.config) for layer in layers]
    reasons = {
        "its attention keeps something else than keys and values": any(
            type(layer) is not Attention for layer in layers
        ),
        "layers share caches": any(layer.kv_sharing_target_layer_name is not None for layer in layers),
        "its layers do not cache alike": any(spec != specs[0] for spec in specs),
        "its attention has sinks": any(layer.has_sink for layer in layers),
        "its attention has position biases": any(
            getattr(layer.impl, "alibi_slopes", None) is not None for layer in layers
        ),
        "its blocks are cut by the attention backend": specs[0].block_size != model.block_size,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"because {reason}")


def _measured(model: RowModel, fingerprint: str) -> PagedDecoder:
    config = model.config.model_config
    # A quantised model may round an activation the other way, which is off by as much as half precision is.
    most = tolerance(torch.bfloat16 if config.quantization else config.dtype)
    decoder = PagedDecoder(model, fingerprint, dtype_name(config.dtype))
    ids = probe_ids(decoder.vocabulary).to(model.device)
    here, logits = _whole(decoder, ids, 0)
    there, _ = _whole(decoder, ids, PROBE_DELTA)
    decoder.rotations = _rotations(model, here, there, most)
    # Scattered rows over exact KV, compared with the same tokens as one sequence.
    total = ids.shape[1]
    rows = torch.tensor([1, 2, total // 2, total - 1], device=ids.device)
    row_logits = decoder.logits(RowRequest(ids[:, rows], Run.read(rows), here))
    largest = logits.abs().amax()
    difference = ((row_logits - logits).abs().amax() / largest).item()
    if not difference <= most:
        raise ValueError(f"because rows run apart differ from its own forward pass by {difference:.1%}")
    return decoder


def _whole(decoder: PagedDecoder, ids: torch.Tensor, shift: int) -> tuple[PagedCache, torch.Tensor]:
    """A prompt as one sequence, as vLLM runs it: its KV at positions `shift...`, and logits of its last row."""
    rows = Run.consecutive(0, ids.shape[1], ids.device)
    cache = decoder.new_cache(ids.shape[1])
    cache.shift = shift
    return cache, decoder.logits(RowRequest(ids, rows, cache))


def _rotations(model: RowModel, here: PagedCache, there: PagedCache, most: float) -> tuple[LayerRotation, ...]:
    known_frequencies = frequencies(model.model)
    rotations = []
    for index in range(len(model.layers)):
        turns: list[Turn | None] = []
        shapes: list[tuple[int, int]] = []
        for before, after in zip(here.view(index), there.view(index), strict=True):
            turn, error = find_turn(before.float(), after.float(), PROBE_DELTA, known_frequencies)
            if not error <= most:
                raise ValueError(f"because no known rotation moves the KV of layer {index} to another position")
            turns.append(turn)
            shapes.append((before.shape[1], before.shape[3]))
        rotations.append(LayerRotation(turns[0], turns[1], shapes[0], shapes[1]))
    return tuple(rotations)
