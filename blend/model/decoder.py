"""The decoder: a HuggingFace causal language model with its tokenizer, admitted by a check instead of by its name.

`RowDecoder` is the contract that blended prefill needs; `Decoder` implements it, and so does vLLM's worker. `full_prefill` is
the model's own prefill, the baseline of every measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blend.errors import ConfigError, first_line
from blend.layout import LEAD_SHARE, PromptLayout
from blend.model.adapters import AdapterState
from blend.model.admission import admit
from blend.model.cache import output_cache
from blend.model.cpu import packed, replace_linear
from blend.model.device_path import DevicePath, take_fast_ways
from blend.model.fingerprint import (
    WeightsWatch,
    checkpoint_digest,
    checkpoint_stamps,
    model_fingerprint,
    parameters_digest,
    unchanged_checkpoint_digest,
)
from blend.model.loading import LoadingProgress
from blend.model.outline import auto_class
from blend.model.precision import NumberFormat, check_weights, pick_dtype, quantize_linear, weights_format
from blend.model.row_decoder import TIMED_ROWS, DrivenDecoder
from blend.stopwatch import Progress, Stopwatch, no_progress
from blend.types import CacheIdentity, dtype_name
from blend.weights import resolve_model
from blend.weights.catalog import here_or_from_hub
from blend_retrieval.hub import LOADING

READ_RATE = 2e9  # bytes a second of stored operators: an assumption

# RoPE whose frequencies depend on the prompt's length once it passes the original context.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class Decoder(DrivenDecoder):
    """A HuggingFace decoder that blended prefill can drive.

    >>> from blend import Decoder
    >>> decoder = Decoder.load("my-model")
    >>> len(decoder.layers), decoder.context_length
    (4, 4096)

    Args:
        model: A HuggingFace causal language model. It is put in eval mode.
        tokenizer: Its tokenizer. None if prompts are token ids and no text is needed.
        name: Its name in messages.
        weights: A digest of the weights. By default it is computed when first needed: of the files that the model came
            from, or of the parameters if they differ from the files.

    Raises:
        UnsupportedModelError: The keys cannot be moved to other positions, or the attention cannot be driven.
    """

    def __init__(self, model: Any, tokenizer: Any = None, name: str = "model", *, weights: str | None = None) -> None:
        super().__init__(model.eval())
        self._weights = weights
        self._fingerprint: str | None = None
        self.tokenizer = tokenizer
        self.name = name
        self.kept_as = dtype_name(self.dtype)
        self.rotations = admit(self, name)
        self._watch = WeightsWatch(model)
        self._adapters = AdapterState(model)

    @classmethod
    def load(
        cls,
        location: str,
        *,
        name: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "native",
        device_path: DevicePath = "auto",
        progress: Progress = no_progress,
    ) -> Decoder:
        """Load a model and its tokenizer.

        Args:
            location: A model directory, a HuggingFace id or a name of the catalog (`blend models`).
            name: Its name in messages; by default its location.
            device: "auto" (the GPU if there is one), "cpu", "cuda" or "cuda:N".
            dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on a GPU, the faster of the first two on a CPU.
            weights: "native", or "int8": weights and activations of 8 bits in all linear layers, on a CPU.
            device_path: "auto" uses what a GPU can do, once it has proved itself; "eager" does without.
            progress: Called with the stage "load", and the tensors of the weights that are loaded so far.

        Returns:
            The decoder.

        Raises:
            ConfigError: The model cannot be loaded.
            UnsupportedModelError: The model cannot be blended.
            WeightsError: The weights of the catalog's model cannot be fetched, or the directory is not there.
        """
        place = pick_device(device)
        check_weights(weights, place)
        name = name or location
        location = str(resolve_model(location))
        with LoadingProgress(progress) as loading:
            before = checkpoint_stamps(location)
            tokenizer, model = _load_files(location, dtype, place, loading)
            digest = checkpoint_digest(location, unless_changed_since=before)
            model = model.to(place)
            if weights == "int8":
                digest = f"{digest or parameters_digest(model)}, {weights}"
            elif place.type == "cpu":
                replace_linear(model, packed)
            decoder = cls(model, tokenizer, name, weights=digest)
            if weights == "int8":  # only now: the model is admitted, and rounding would hide how keys and values rotate
                quantize_linear(model)
                decoder._watch = WeightsWatch(model)
            take_fast_ways(decoder, device_path)
        return decoder

    @cached_property
    def operator_rows(self) -> float:
        """Rows that the model computes while the operators of one chunk are read, timed here; 0 without recurrent layers."""
        nbytes = sum(layer.operator_bytes for layer in self.recurrent.values())
        if not nbytes:
            return 0.0
        return nbytes / READ_RATE * TIMED_ROWS / self.seconds_of(TIMED_ROWS)

    @cached_property
    def context_length(self) -> int | None:
        """The longest prompt in tokens, or None if the configuration states no limit."""
        return _longest_prompt(self.config)

    @cached_property
    def number_format(self) -> NumberFormat:
        """What it computes in."""
        return NumberFormat(dtype=dtype_name(self.dtype), weights=weights_format(self.model))

    @property
    def fingerprint(self) -> str:
        """Hex digest of the weights and of every configuration entry that the computation depends on."""
        if self._fingerprint is None:
            weights = self._weights or unchanged_checkpoint_digest(self.model) or parameters_digest(self.model)
            adapters = self._adapters.words
            self._fingerprint = model_fingerprint(self.config, f"{weights}, {adapters}" if adapters else weights)
        return self._fingerprint

    def follow_weights(self) -> None:
        """Give the decoder a new fingerprint, and CUDA graphs, if its weights have changed or its adapters were switched."""
        if not (self._watch.changed or self._adapters.changed):
            return
        self._watch = WeightsWatch(self.model)
        self._adapters = AdapterState(self.model)
        self._weights = self._fingerprint = None
        if self.graphs is not None:
            take_fast_ways(self)

    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What determines a chunk's cache besides its tokens: the model as it is now, dtype and prefix."""
        self.follow_weights()
        operators = f", operators behind {LEAD_SHARE}" if self.recurrent else ""
        return CacheIdentity(self.fingerprint + operators, self.kept_as, prefix)


def _load_files(location: str, dtype: str, device: torch.device, loading: LoadingProgress) -> tuple[Any, Any]:
    """The tokenizer and the model in these files. Raises `ConfigError`."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    def load(**where: bool) -> tuple[Any, Any]:
        tokenizer = AutoTokenizer.from_pretrained(location, **where)
        config = AutoConfig.from_pretrained(location, **where)
        chosen = pick_dtype(dtype, device, config)
        with LOADING, loading.counting():
            bar = loading.bar_of_downloads()
            return tokenizer, auto_class(config).from_pretrained(location, dtype=chosen, tqdm_class=bar, **where)

    try:
        return here_or_from_hub(location, load)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises anything for a damaged file
        raise ConfigError(_unloadable(location, error)) from error


def _longest_prompt(config: Any) -> int | None:
    """The longest prompt that a text model's configuration allows, or None.

    RoPE types whose frequencies depend on length end at the original context: beyond it, stored keys cannot be moved.
    """
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else list(rope.values())  # one for each kind of layer
    limits = [longest]
    for kind in kinds:
        if kind.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            limits.append(kind.get("original_max_position_embeddings"))
    return min(filter(None, limits), default=None)


def pick_device(device: str) -> torch.device:
    """The device that an option names; "auto" prefers the GPU. Raises `ConfigError`."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} asked for, but torch sees no GPU here; use --device cpu")
    return place


def _unloadable(name: str, error: Exception) -> str:
    explains_itself = isinstance(error, OSError | ValueError)
    reason = first_line(error) if explains_itself else f"{type(error).__name__}: {first_line(error)}"
    if Path(name).is_dir():
        return f"{name} holds no causal language model that transformers can load ({reason})"
    return (
        f"cannot load model {name!r}: not a directory, and no hub answers for it ({reason}); "
        "pass a model directory, a reachable HuggingFace id, or a catalog name (`blend models`)"
    )


@dataclass
class FullPrefill:
    """A prompt prefilled by the model's own attention and cache.

    logits: of the next token, `[1, vocab]`. first_token: their argmax. ttft_s: seconds until that id is on the host.
    """

    decoder: Decoder
    cache: Any
    logits: Tensor
    first_token: int
    ttft_s: float

    @torch.inference_mode()
    def append(self, token_ids: Tensor) -> Tensor:
        """Run further tokens `[1, n]`. Returns logits `[1, n, vocab]`."""
        start = self.cache.get_seq_length()
        stop = start + token_ids.shape[1]
        positions = torch.arange(start, stop, device=token_ids.device)[None]
        cache = {self.decoder.cache_argument: self.cache}
        # Without positions, transformers' Bamba counts from 0.
        out = self.decoder.run_whole(input_ids=token_ids, position_ids=positions, use_cache=True, **cache)
        return out.logits  # type: ignore[no-any-return]


@torch.inference_mode()
def full_prefill(decoder: Decoder, layout: PromptLayout) -> FullPrefill:
    """Prefill the whole prompt with the model's own forward pass. Raises `PromptError` for unknown token ids."""
    decoder.check_ids(layout.token_ids)
    watch = Stopwatch(decoder.device)
    ids = torch.from_numpy(layout.ids)[None].to(decoder.device)
    out = decoder.run_whole(input_ids=ids, use_cache=True, **decoder.last_row_only)
    logits = out.logits[:, -1]
    first_token = int(logits[0].argmax())
    return FullPrefill(decoder, output_cache(out), logits, first_token, watch.total())
