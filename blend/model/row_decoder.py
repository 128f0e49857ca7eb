"""What blended prefill needs of a decoder, and a HuggingFace decoder that offers it.

`RowDecoder` is the contract; vLLM's worker has its own implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from blend.errors import ContextLengthError, PromptError
from blend.model.attention import AttentionCall
from blend.model.cache import BlendedCache, LayerRotation, Run
from blend.model.driver import RowDriver
from blend.model.graphs import RowGraphs
from blend.model.passes import Halt, OnLayer, RowRequest, nothing
from blend.model.recurrent import LayerState
from blend.stopwatch import Stopwatch
from blend.types import CacheIdentity, ChunkCache
from blend_kernels import Backend, ChunkShape, LayerShape, Packing

TIMED_ROWS = 64
MANY_TIMED_ROWS = 2048


class RowDecoder(ABC):
    """What blended prefill needs of a decoder. Its properties never change, except for the identity of its weights.

    Attributes:
        name: in messages and in a store.
        layers: has the length of the number of layers.
        rotations: how cached keys and values rotate with position, for each layer that keeps something; later ones read theirs.
        kept_as: the dtype under whose name its caches are stored; its own, or another one whose caches serve as well.
        recurrent: its layers with a recurrent state, by index.
        placing: the backend that places chunks; None for the device's usual one.
        graphs: passes that a GPU repeats, or None.
        workers: processes that compute the model together, each with the KV heads of all.
        copies_share_rows: whether a copy of a cache takes no room for the rows that it has of it.

    """

    name: str
    kept_as: str
    placing: Backend | None = None
    graphs: RowGraphs | None = None
    workers = 1
    copies_share_rows = False
    layers: Any
    rotations: tuple[LayerRotation, ...]
    recurrent: Mapping[int, LayerState] = {}

    @property
    def attending(self) -> Sequence[int]:
        """Indices of the layers that have attention."""
        depth = len(self.rotations)
        with_kv = [index for index, rotation in enumerate(self.rotations) if rotation.width]
        return [*with_kv, *range(depth, len(self.layers))]

    @property
    def pass_rows(self) -> float:
        """Rows of a long pass that take as long as the launches of blending's two passes; 0 where nothing is timed."""
        return 0.0

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of the weights and of every configuration entry that the computation depends on."""

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

    @property
    def cells(self) -> int | None:
        """The most rows of all its caches together, or None for as many as memory holds."""
        return None

    @property
    def most_caches(self) -> int | None:
        """The most caches at a time, or None."""
        return None

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

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """Values that are the same in all workers."""
        return values

    def together(self, step: Callable[[], Hashable]) -> None:
        """Do a step that runs no rows, and whose outcome must be the same in all workers."""
        step()

    @abstractmethod
    def new_cache(self, capacity: int) -> BlendedCache:
        """An empty cache with room for `capacity` rows."""

    def no_rows(self) -> ChunkCache:
        """The KV of zero tokens."""

        def empty(heads: int, dim: int) -> Tensor:
            return torch.empty((heads, 0, dim), dtype=self.dtype, device=self.device)

        keys = tuple(empty(*layer.key_shape) for layer in self.rotations)
        values = tuple(empty(*layer.value_shape) for layer in self.rotations)
        return ChunkCache(keys, values, 0)

    @abstractmethod
    def encode_rows(self, token_ids: Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of a contiguous run of tokens `[batch, n]` at positions `start...` into `cache`."""

    @abstractmethod
    def watch_attention(
        self,
        token_ids: Tensor,
        run: Run,
        cache: BlendedCache,
        observe: Callable[[AttentionCall], None],
        *,
        last_layer: int | None = None,
        await_layer: OnLayer = nothing,
    ) -> None:
        """Run rows to observe their attention, up to and including `last_layer`; KV is written.

        await_layer: see `RowRequest`.
        """


class DrivenDecoder(RowDriver, RowDecoder):
    """A HuggingFace decoder that blended prefill drives. Abstract: what names its caches is missing."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._pass_rows: dict[bool, float] = {}

    @property
    def pass_rows(self) -> float:
        """Rows of a long pass that take as long as the launches of blending's two passes; timed on a GPU, none on a CPU.

        A long pass hides its launches behind its work, passes of the question and of the chosen rows do not. Timed again once
        there is a graph for short passes.
        """
        if self.device.type == "cpu":
            return 0.0
        by_graph = self.graphs is not None and TIMED_ROWS in self.graphs.captured
        if by_graph not in self._pass_rows:
            rows = self.seconds_of(TIMED_ROWS) / self.seconds_of(MANY_TIMED_ROWS) * MANY_TIMED_ROWS
            self._pass_rows[by_graph] = 2 * max(0.0, rows - TIMED_ROWS)
        return self._pass_rows[by_graph]

    @property
    def layer_weights(self) -> int:
        """Numbers in the weights of all layers."""
        return sum(part.numel() for layer in self.layers for part in layer.parameters())

    def seconds_of(self, count: int) -> float:
        """Seconds of a pass over so many rows, the second one of two: the first one warms up."""
        ids = torch.arange(count, device=self.device)[None] % self.vocabulary
        cache = self.new_cache(count)
        for _ in range(2):
            watch = Stopwatch(self.device)
            run = Run.consecutive(0, count, self.device)
            self.prefill([RowRequest(ids, run, cache)])
            seconds = watch.total()
        return seconds

    def new_cache(self, capacity: int) -> BlendedCache:
        """An empty cache with room for `capacity` rows."""
        cache = BlendedCache(self.kv_layers, capacity)
        for layer, rotation in zip(cache.layers, self.rotations, strict=True):
            if not rotation.width:
                no_kv = torch.empty((1, 0, 0, 0), dtype=self.dtype, device=self.device)
                layer.lazy_initialization(no_kv, no_kv)
        return cache

    def native_cache(self, cache: BlendedCache) -> Any:
        """A cache that the model's own forward pass can continue; with recurrent layers a copy in transformers' own classes."""
        states = cache.states(cache.get_seq_length())
        if not self.recurrent or not states:
            return cache
        native = DynamicCache(config=self.config)
        for index, layer in enumerate(native.layers[: self.kv_layers]):
            if self.rotations[index].width:
                layer.update(*(part.clone() for part in cache.view(index)))
            if (recurrent := self.recurrent.get(index)) is not None:
                state = recurrent.state(states[index])
                for number, part in enumerate(state.conv):
                    layer.update_conv_state(part, number)
                if state.recurrent is not None:
                    layer.update_recurrent_state(state.recurrent)
        return native

    @torch.inference_mode()
    def prefill(self, requests: Sequence[RowRequest]) -> Tensor:
        """`RowDriver.prefill`, by a graph if there is one."""
        if self.graphs is not None and (logits := self.graphs.logits(requests)) is not None:
            return logits
        return super().prefill(requests)

    @torch.inference_mode()
    def append(self, token_ids: Tensor, cache: BlendedCache) -> Tensor:
        """Run tokens `[1, n]` right after the cache's rows (decoding, teacher forcing). Returns logits `[1, n, vocab]`."""
        return self.prefill([_following(token_ids, cache)])[None]

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[Tensor], caches: Sequence[BlendedCache]) -> Tensor:
        """One decoding step of several sequences: a token `[1, 1]` each. Returns logits `[sequences, vocab]`."""
        pairs = zip(token_ids, caches, strict=True)
        return self.prefill([_following(ids, cache) for ids, cache in pairs])

    @torch.inference_mode()
    def encode_rows(self, token_ids: Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of a contiguous run of tokens `[batch, n]` at positions `start...` into `cache`."""
        run = Run.consecutive(start, start + token_ids.shape[1], token_ids.device)
        request = RowRequest(token_ids, run, cache)
        if self.recurrent:  # no place to halt at once the last state is there
            self.prefill([request])
        else:
            self.run([request], halt_at=self.kv_layers - 1)

    @torch.inference_mode()
    def watch_attention(
        self,
        token_ids: Tensor,
        run: Run,
        cache: BlendedCache,
        observe: Callable[[AttentionCall], None],
        *,
        last_layer: int | None = None,
        await_layer: OnLayer = nothing,
    ) -> None:
        """Run rows to observe their attention, up to and including `last_layer`; KV is written."""
        last = len(self.layers) - 1 if last_layer is None else last_layer

        def observe_and_halt(call: AttentionCall) -> None:
            observe(call)
            if call.layer >= last:
                raise Halt((call.key, call.value))

        request = RowRequest(token_ids, run, cache, observe=observe_and_halt, await_layer=await_layer)
        self.run([request])

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Compute with the model in this thread alone; blended prefills in other threads wait.

        Needed for direct calls such as `model.generate`: a blended prefill temporarily replaces the model's attention.
        """
        with self.lock:
            yield

    @contextmanager
    def before_head(self, call: Callable[[], None]) -> Iterator[None]:
        """Call `call` when a forward pass reaches the LM head, except while a graph is captured."""

        def reached(module: Any, args: Any) -> None:
            if self.graphs is None or not self.graphs.capturing:
                call()

        head = self.model.get_output_embeddings()
        with self.lock, head.register_forward_pre_hook(reached):
            yield


def _following(token_ids: Tensor, cache: BlendedCache) -> RowRequest:
    """A request for tokens `[1, n]` right after the rows of a cache, which reserves room for them."""
    rows = token_ids.shape[1]
    start = cache.get_seq_length()
    stop = start + rows
    cache.reserve(stop)
    run = Run.consecutive(start, stop, token_ids.device)
    return RowRequest(token_ids, run, cache, outputs=rows)
