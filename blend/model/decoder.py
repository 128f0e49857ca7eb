"""The decoder: a HuggingFace causal language model with its tokenizer, admitted by a check instead of by its name.

`RowDecoder` is the contract that blended prefill needs; `Decoder` implements it, and so does vLLM's worker. `full_prefill` is
the model's own prefill, the baseline of every measurement.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from blend.errors import ConfigError, ContextLengthError, PromptError, first_line
from blend.model.admission import Admitted, admit
from blend.model.attention import AttentionCall
from blend.model.cache import BlendedCache, LayerRotation, Run, output_cache
from blend.model.cpu import packed, replace_linear
from blend.model.device_path import DevicePath, take_fast_ways
from blend.model.fingerprint import (
    WeightsWatch,
    checkpoint_digest,
    checkpoint_stamps,
    model_fingerprint,
    parameters_digest,
)
from blend.model.forward import Halt, RowDriver, RowRequest
from blend.model.outline import auto_class
from blend.model.precision import NumberFormat, check_weights, dtype_name, pick_dtype, quantize_linear, weights_format
from blend.model.recurrent import LayerState
from blend.types import LEAD_SHARE, CacheIdentity, ChunkCache, PromptLayout, Stopwatch
from blend.weights import resolve_model
from blend.weights.catalog import here_or_from_hub
from blend_kernels import Backend, ChunkShape, LayerShape, Packing

READ_RATE = 2e9  # bytes a second of stored operators: an assumption, as in `blend plan`
_TIMED_ROWS, _MANY_TIMED_ROWS = 64, 2048


class RowDecoder(ABC):
    """What blended prefill needs of a decoder. Its properties never change, except for the identity of its weights.

    name: in messages and in a store. layers: has the length of the number of layers. rotations: how cached keys and values
    rotate with position, for each layer that keeps something; layers behind these read their KV. kept_as: the dtype under whose
    name its caches are stored; its own, or another one whose caches serve as well. recurrent: its layers with a recurrent
    state, by index. placing: the backend that places chunks; None for the device's usual one.
    """

    name: str
    kept_as: str
    placing: Backend | None = None
    layers: Any
    rotations: tuple[LayerRotation, ...]
    recurrent: Mapping[int, LayerState] = {}

    @property
    def attending(self) -> Sequence[int]:
        """Indices of the layers that have attention."""
        kept = len(self.rotations)
        return [index for index in range(len(self.layers)) if index >= kept or self.rotations[index].width]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of weights and caches."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def context_length(self) -> int | None:
        """The longest prompt in tokens, or None."""

    @abstractmethod
    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What determines a chunk's cache besides its tokens: model, dtype and prefix."""

    def chunk_shape(self, packing: Packing) -> ChunkShape:
        """The shape of chunks' KV in memory, the same object for the same packing. packing: "plain", or a codec's."""
        shapes: dict[Packing, ChunkShape] = self.__dict__.setdefault("_chunk_shapes", {})
        if packing not in shapes:
            layers = tuple([LayerShape(*layer.key_shape, *layer.value_shape) for layer in self.rotations])
            shapes[packing] = ChunkShape(layers, self.dtype, packing)
        return shapes[packing]

    def check_length(self, rows: int) -> None:
        """Raise `ContextLengthError` for a prompt of `rows` tokens beyond the decoder's context."""
        if self.context_length is not None and rows > self.context_length:
            raise ContextLengthError(
                f"the prompt has {rows} tokens but {self.name} reads at most {self.context_length}; "
                "use fewer or smaller chunks (--top-k, --chunk-tokens)",
                self.context_length,
                rows,
            )

    def answer_length(self, rows: int, most: int) -> int:
        """The longest answer behind a prompt of `rows` tokens: `most` tokens, or what the context leaves.

        Raises `ContextLengthError` if it leaves none.
        """
        self.check_length(rows + 1)
        return most if self.context_length is None else min(most, self.context_length - rows)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise `PromptError` for token ids outside the vocabulary, which would break a GPU's context."""
        for wrong in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= wrong < self.vocabulary:
                raise PromptError(
                    f"the prompt holds token id {wrong}; the model has those from 0 to {self.vocabulary - 1}"
                )

    @abstractmethod
    def new_cache(self, capacity: int) -> BlendedCache:
        """An empty cache with room for `capacity` rows."""

    def no_rows(self) -> ChunkCache:
        """The KV of zero tokens."""
        keys, values = (
            tuple(torch.empty((heads, 0, width), dtype=self.dtype, device=self.device) for heads, width in shapes)
            for shapes in zip(*((layer.key_shape, layer.value_shape) for layer in self.rotations), strict=True)
        )
        return ChunkCache(keys, values, 0)

    @abstractmethod
    def encode_rows(self, token_ids: torch.Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of a contiguous run of tokens `[batch, n]` at positions `start...` into `cache`."""

    @abstractmethod
    def watch_attention(
        self,
        token_ids: torch.Tensor,
        run: Run,
        cache: BlendedCache,
        observe: Callable[[AttentionCall], None],
        *,
        last_layer: int | None = None,
        await_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Run rows to observe their attention, up to and including `last_layer`; KV is written.

        await_layer: see `RowRequest`.
        """


# RoPE whose frequencies depend on the prompt's length once it passes the original context.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class Decoder(RowDriver, RowDecoder):
    """A HuggingFace decoder that blended prefill can drive.

    Args:
        model: A HuggingFace causal language model. It is put in eval mode.
        tokenizer: Its tokenizer. None if prompts are token ids and no text is needed.
        name: Its name in messages.
        weights: A digest of the weights. By default it is computed from the parameters when first needed.
        admitted: What `admit` found for the model before its layers got weights of 8 bits. By default it is admitted now.

    Raises:
        UnsupportedModelError: The keys cannot be moved to other positions, or the attention cannot be driven.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        name: str = "model",
        *,
        weights: str | None = None,
        admitted: Admitted | None = None,
    ) -> None:
        super().__init__(model.eval())
        self._weights = weights
        self.tokenizer = tokenizer
        self.name = name
        self.kept_as = dtype_name(self.dtype)
        self.rotations, self.recurrent = admit(self, name) if admitted is None else admitted
        self.kv_layers = len(self.rotations)
        self._watch = WeightsWatch(model)

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
    ) -> Decoder:
        """Load a model and its tokenizer.

        Args:
            location: A model directory, a HuggingFace id or a name of the catalog (`blend models`).
            name: Its name in messages; by default its location.
            device: "auto" (the GPU if there is one), "cpu", "cuda" or "cuda:N".
            dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on a GPU, the faster of the first two on a CPU.
            weights: "native", or "int8": weights and activations of 8 bits in all linear layers, on a CPU.
            device_path: "auto" uses what a GPU can do, once it has proved itself; "eager" does without.

        Returns:
            The decoder.

        Raises:
            ConfigError: The model cannot be loaded.
            UnsupportedModelError: The model cannot be blended.
            WeightsError: The weights of the catalog's model cannot be fetched, or the directory is not there.
        """
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils import logging

        place = pick_device(device)
        check_weights(weights, place)
        logging.disable_progress_bar()
        name, location = name or location, str(resolve_model(location))

        def load(**where: bool) -> tuple[Any, Any]:
            tokenizer, config = (kind.from_pretrained(location, **where) for kind in (AutoTokenizer, AutoConfig))
            chosen = pick_dtype(dtype, place, config)
            return tokenizer, auto_class(config).from_pretrained(location, dtype=chosen, **where)

        before = checkpoint_stamps(location)
        try:
            tokenizer, model = here_or_from_hub(location, load)
        except ConfigError:
            raise
        except Exception as error:  # transformers raises anything for a damaged file
            raise ConfigError(_unloadable(location, error)) from error
        digest = checkpoint_digest(location, unless_changed_since=before)
        model = model.to(place)
        if weights == "native":
            if place.type == "cpu":
                replace_linear(model, packed)
            decoder = cls(model, tokenizer, name, weights=digest)
            take_fast_ways(decoder, device_path)
            return decoder
        digest = f"{digest or parameters_digest(model)}, {weights}"
        admitted = admit(RowDriver(model.eval()), name)  # rounding to 8 bits would hide how keys and values rotate
        quantize_linear(model)
        return cls(model, tokenizer, name, weights=digest, admitted=admitted)

    @cached_property
    def operator_rows(self) -> float:
        """Rows that the model computes while the operators of one chunk are read, timed here; 0 without recurrent layers."""
        nbytes = sum(layer.operator_bytes for layer in self.recurrent.values())
        if not nbytes:
            return 0.0
        return nbytes / READ_RATE * _TIMED_ROWS / self.seconds_of(_TIMED_ROWS)

    @cached_property
    def pass_rows(self) -> float:
        """Rows of a long pass that take as long as launching one more pass; timed here on a GPU, none on a CPU.

        A pass takes `a + b rows`. Blending takes one pass more than full prefill, so it must save `a / b` rows.
        """
        if self.device.type == "cpu":
            return 0.0
        short, long = self.seconds_of(_TIMED_ROWS), self.seconds_of(_MANY_TIMED_ROWS)
        a_row = (long - short) / (_MANY_TIMED_ROWS - _TIMED_ROWS)
        return max(0.0, short / a_row - _TIMED_ROWS) if a_row > 0 else math.inf

    def seconds_of(self, count: int) -> float:
        """Seconds of a pass over so many rows, the second one of two: the first one warms up."""
        ids = torch.arange(count, device=self.device)[None] % self.vocabulary
        for _ in range(2):
            watch = Stopwatch(self.device)
            self.encode_rows(ids, 0, self.new_cache(count))
            seconds = watch.total()
        return seconds

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
        """Hex digest of the weights and of every configuration entry that the computation depends on.

        A change of the weights that `WeightsWatch` notices gives a new digest.
        """
        if self._watch.changed:
            self._watch, self._weights = WeightsWatch(self.model), None
            vars(self).pop("_fingerprint", None)
            if self.graphs is not None:  # they hold the old weights
                take_fast_ways(self)
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return model_fingerprint(self.config, self._weights or parameters_digest(self.model))

    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What determines a chunk's cache besides its tokens: model, dtype and prefix."""
        operators = f", operators behind {LEAD_SHARE}" if self.recurrent else ""
        return CacheIdentity(self.fingerprint + operators, self.kept_as, prefix)

    def new_cache(self, capacity: int) -> BlendedCache:
        """An empty cache with room for `capacity` rows."""
        cache = BlendedCache(self.kv_layers, capacity)
        for layer, rotation in zip(cache.layers, self.rotations, strict=True):
            if not rotation.width:
                layer.allocate(*(torch.empty((1, 0, 0, 0), dtype=self.dtype, device=self.device),) * 2)
        return cache

    def native_cache(self, cache: BlendedCache) -> Any:
        """A cache that the model's own forward pass can continue; with recurrent layers a copy in transformers' own classes."""
        states = cache.states(cache.get_seq_length())
        if not self.recurrent or not states:
            return cache
        own = DynamicCache(config=self.config)
        for index, layer in enumerate(own.layers[: self.kv_layers]):
            if self.rotations[index].width:
                layer.update(*(part.clone() for part in cache.view(index)))
            if (recurrent := self.recurrent.get(index)) is not None:
                state = recurrent.state(states[index])
                for number, part in enumerate(state.conv):
                    layer.update_conv_state(part, number)
                if state.recurrent is not None:
                    layer.update_recurrent_state(state.recurrent)
        return own

    @torch.inference_mode()
    def append(self, token_ids: torch.Tensor, cache: BlendedCache) -> torch.Tensor:
        """Run tokens `[1, n]` right after the cache's rows (decoding, teacher forcing). Returns logits `[1, n, vocab]`."""
        request = _following(token_ids, cache)
        if self.graphs is not None and (replayed := self.graphs.logits([request])) is not None:
            return replayed[None]
        return self.run([request]).logits  # type: ignore[no-any-return]

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[torch.Tensor], caches: Sequence[BlendedCache]) -> torch.Tensor:
        """One decoding step of several sequences: a token `[1, 1]` each. Returns logits `[sequences, vocab]`."""
        return self.prefill([_following(ids, cache) for ids, cache in zip(token_ids, caches, strict=True)])

    @torch.inference_mode()
    def encode_rows(self, token_ids: torch.Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of a contiguous run of tokens `[batch, n]` at positions `start...` into `cache`."""
        run = Run.consecutive(start, start + token_ids.shape[1], token_ids.device)
        request = RowRequest.of(token_ids, run, cache)
        if self.recurrent:  # no place to halt at once the last state is there
            self.prefill([request])
        else:
            self.run([request], halt_at=self.kv_layers - 1)

    @torch.inference_mode()
    def watch_attention(
        self,
        token_ids: torch.Tensor,
        run: Run,
        cache: BlendedCache,
        observe: Callable[[AttentionCall], None],
        *,
        last_layer: int | None = None,
        await_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Run rows to observe their attention, up to and including `last_layer`; KV is written."""
        last = len(self.layers) - 1 if last_layer is None else last_layer

        def observe_and_halt(call: AttentionCall) -> None:
            observe(call)
            if call.layer >= last:
                raise Halt((call.key, call.value))

        self.run([RowRequest.of(token_ids, run, cache, observe=observe_and_halt, await_layer=await_layer)])

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Compute with the model in this thread alone; blended prefills in other threads wait.

        Needed for direct calls such as `model.generate`: a blended prefill temporarily replaces the model's attention.
        """
        with self.lock:
            yield

    @contextmanager
    def before_head(self, call: Callable[[], None]) -> Iterator[None]:
        """Call `call` when a forward pass reaches the LM head."""
        head = self.model.get_output_embeddings()
        with self.lock:
            handle = head.register_forward_pre_hook(lambda module, args: call())
            try:
                yield
            finally:
                handle.remove()

    @cached_property
    def last_row_only(self) -> dict[str, Any]:
        """Forward arguments that compute the LM head for the last row only; empty if the model has none."""
        accepted = inspect.signature(self.model.forward).parameters
        return {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}


def _following(token_ids: torch.Tensor, cache: BlendedCache) -> RowRequest:
    """A request for tokens `[1, n]` right after the rows of a cache, which reserves room for them."""
    start = cache.get_seq_length()
    stop = start + token_ids.shape[1]
    cache.reserve(stop)
    return RowRequest.of(token_ids, Run.consecutive(start, stop, token_ids.device), cache, outputs=token_ids.shape[1])


def _longest_prompt(config: Any) -> int | None:
    """The longest prompt that a text model's configuration allows, or None.

    RoPE types whose frequencies depend on length end at the original context: beyond it, stored keys cannot be moved.
    """
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else list(rope.values())  # one for each kind of layer
    limits = [k.get("original_max_position_embeddings") for k in kinds if k.get("rope_type") in LENGTH_DEPENDENT_ROPE]
    return min([limit for limit in (longest, *limits) if limit], default=None)


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
    logits: torch.Tensor
    first_token: int
    ttft_s: float

    @torch.inference_mode()
    def append(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Run further tokens `[1, n]`. Returns logits `[1, n, vocab]`."""
        start = self.cache.get_seq_length()
        positions = torch.arange(start, start + token_ids.shape[1], device=token_ids.device)[None]
        cache = {self.decoder.cache_argument: self.cache}
        # Without positions, transformers' Bamba counts from 0.
        out = self.decoder.run_whole(input_ids=token_ids, position_ids=positions, use_cache=True, **cache)
        return out.logits  # type: ignore[no-any-return]


@torch.inference_mode()
def full_prefill(decoder: Decoder, layout: PromptLayout) -> FullPrefill:
    """Prefill the whole prompt with the model's own forward pass. Raises `PromptError` for unknown token ids."""
    decoder.check_ids(layout.token_ids)
    watch = Stopwatch(decoder.device)
    ids = torch.tensor([layout.token_ids], device=decoder.device)
    out = decoder.run_whole(input_ids=ids, use_cache=True, **decoder.last_row_only)
    logits = out.logits[:, -1]
    first_token = int(logits[0].argmax())
    return FullPrefill(decoder, output_cache(out), logits, first_token, watch.total())
