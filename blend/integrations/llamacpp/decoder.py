"""A GGUF model in llama.cpp as kvblend's decoder: it runs rows over cells of a context."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blend.errors import ConfigError
from blend.integrations.llamacpp.admission import admitted
from blend.integrations.llamacpp.cache import WAVE_ROWS, CellCache, compute_following
from blend.integrations.llamacpp.context import SEQUENCES, AttentionNode, ContextOptions
from blend.integrations.llamacpp.library import Library
from blend.integrations.llamacpp.model import GGUFModel
from blend.integrations.llamacpp.state import hadamard
from blend.model.attention import AttentionCall
from blend.model.cache import BlendedCache, Run
from blend.model.passes import OnLayer, RowRequest, nothing
from blend.model.precision import NumberFormat
from blend.model.row_decoder import RowDecoder
from blend.types import CacheIdentity, dtype_name

SPARE_SEQUENCES = 16  # that prompts and answers leave to waves, chunks and reading


class CellDecoder(RowDecoder):
    """A `RowDecoder` over a context of llama.cpp. `close` frees model and context.

    >>> from blend.integrations.llamacpp.decoder import CellDecoder
    >>> decoder = CellDecoder.load("model.gguf")  # doctest: +SKIP
    >>> len(decoder.layers), decoder.context_length  # doctest: +SKIP
    (24, 8096)

    Args:
        model: the model.
        options: of its context.
        tokenizer: by default the one in the model's file.
        wave_rows: most rows that are recomputed together in several runs: see `waves_of`.

    Raises:
        ConfigError: this build of llama.cpp keeps states in an unknown format.
        UnsupportedModelError: the model cannot be blended.

    """

    copies_share_rows = True
    graphs = None
    pass_rows = 0.0
    operator_rows = 0.0
    last_row_only: Mapping[str, Any] = {}
    cache_argument = "cache"

    def __init__(
        self,
        model: GGUFModel,
        options: ContextOptions | None = None,
        *,
        tokenizer: Any = None,
        wave_rows: int = WAVE_ROWS,
    ) -> None:
        options = options or ContextOptions()
        self._gguf = model
        self._context, self._layout, self._nodes = admitted(model, options)
        self._tokenizer = tokenizer
        self.name = model.name
        self.rotations = self._layout.rotations
        self.layers = range(len(self.rotations))
        self.kv_layers = len(self.rotations)
        self.kept_as = dtype_name(self.dtype)
        self.lock = self._context.lock
        self.wave_rows = wave_rows
        words = ("llama.cpp", model.digest, options.cache_type)
        self._fingerprint = sha256("\n".join(words).encode()).hexdigest()[:32]

    @classmethod
    def load(
        cls, file: str | Path, options: ContextOptions | None = None, *, library: str = "", tokenizer: Any = None
    ) -> CellDecoder:
        """Load a GGUF file. library: llama.cpp's, by default that of the package xllamacpp.

        Raises `ConfigError` and `UnsupportedModelError`.
        """
        return cls(GGUFModel(Library(library), file), options, tokenizer=tokenizer)

    def close(self) -> None:
        """Free context and model."""
        self._context.close()
        self._gguf.close()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises `ConfigError` if the file's cannot be read."""
        return self._gguf.tokenizer if self._tokenizer is None else self._tokenizer

    @property
    def config(self) -> Any:
        """The model's configuration, as transformers reads it from the file."""
        return self._gguf.config

    @cached_property
    def model(self) -> Any:
        """What `model.generate` needs of a model: its configurations. It computes nothing."""
        from blend.integrations.llamacpp.generation import shell_of

        return shell_of(self._gguf)

    @property
    def fingerprint(self) -> str:
        """Of the file's bytes, and of what the context keeps keys and values in."""
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """Where kvblend's part is computed."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values outside llama.cpp."""
        return self._layout.dtype

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self._gguf.vocabulary

    @property
    def sizes(self) -> Mapping[str, int]:
        """See `GGUFModel.sizes`."""
        return self._gguf.sizes

    @property
    def context_length(self) -> int | None:
        """The longest prompt: what the model was trained for, or what the context holds with a wave of recomputed rows."""
        return min(self._gguf.trained_context, self.cells)

    @property
    def cells(self) -> int:
        """The most rows of all prompts together: some of the context's cells are left for a wave of recomputed rows."""
        return self._context.cells - min(self.wave_rows, self._context.cells // 4)

    @property
    def most_caches(self) -> int:
        """How many prompts and answers there may be: sequences are left for waves."""
        return (SEQUENCES - SPARE_SEQUENCES) // (2 if self._gguf.window else 1)

    @property
    def layer_weights(self) -> int:
        """Numbers in the weights of all layers."""
        return self._gguf.layer_weights

    @property
    def number_format(self) -> NumberFormat:
        """What it computes in."""
        return NumberFormat(dtype=self.kept_as, weights=f"GGUF {self._gguf.description}")

    def identity(self, prefix: tuple[int, ...]) -> CacheIdentity:
        """What, besides a chunk's tokens, determines its cache."""
        return CacheIdentity(self.fingerprint, self.kept_as, prefix)

    def follow_weights(self) -> None:
        """Nothing: the weights of a file do not change."""

    # Rows

    def new_cache(self, capacity: int) -> CellCache:
        """An empty cache; `capacity` rows are reserved outside llama.cpp."""
        return CellCache(self._context, self._layout, capacity)

    def native_cache(self, cache: BlendedCache) -> BlendedCache:
        """The cache itself."""
        return cache

    def encode_rows(self, token_ids: Tensor, start: int, cache: BlendedCache) -> None:
        """Write the KV of a contiguous run of tokens `[batch, n]` at positions `start...` into `cache`."""
        run = Run.consecutive(start, start + token_ids.shape[1], token_ids.device)
        if token_ids.shape[0] == 1:
            _cells(cache).compute(RowRequest(token_ids, run, cache, outputs=0))
            return
        layers = cache.layers
        stop = start + token_ids.shape[1]
        for row, ids in enumerate(token_ids):
            alone = self.new_cache(stop)
            prefix = [tuple(part[row : row + 1, :, :start] for part in layer.view()) for layer in layers]
            if start:
                alone.begin([keys[0] for keys, _ in prefix], [values[0] for _, values in prefix], start)
            alone.compute(RowRequest(ids[None], run, alone, outputs=0))
            for layer, fresh in zip(layers, alone.layers, strict=True):
                keys, values = (part[:, :, start:stop] for part in fresh.view())
                layer.keys[row : row + 1, :, start:stop] = keys
                layer.values[row : row + 1, :, start:stop] = values
                layer.length = stop
            alone.free()

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
        """Run rows to observe their attention, up to and including `last_layer`; KV is written to the buffers alone.

        await_layer: see `RowRequest`.
        """
        last = len(self.layers) - 1 if last_layer is None else last_layer
        queries = _Queries(last)
        request = RowRequest(token_ids, run, cache, await_layer=await_layer)
        kvs = _cells(cache).look(request, self.wave_rows, queries.take)
        for layer in range(last + 1):
            cache.layers[layer].write_rows(run, *kvs[layer])
            observe(self._attention_call(layer, queries.of(layer), cache, run))

    def _attention_call(self, layer: int, query: Tensor, cache: BlendedCache, run: Run) -> AttentionCall:
        node = self._nodes[layer]
        state_format = self._context.state_format
        is_windowed = state_format.order[layer][0] == 1
        rule = {
            "window": self._gguf.window if is_windowed else None,
            "softcap": node.softcap,
            "scale": node.scale,
            "sinks": node.sinks,
        }
        query = hadamard(query, state_format.types(layer)[0].turned)
        keys, values = (part[:, :, : run.stop].float() for part in cache.view(layer))
        return AttentionCall(layer, query[None], keys, values, run.shared, rule)

    @torch.inference_mode()
    def prefill(self, requests: Sequence[RowRequest]) -> Tensor:
        """Run rows of several prompts; logits of the last `outputs` rows of each, `[outputs, vocab]`.

        The next rows of several prompts share a pass, other rows have passes to themselves.
        """
        caches = [_cells(request.cache) for request in requests]
        pairs = zip(caches, requests, strict=True)
        if len(requests) > 1 and all(cache.follows(request) and _is_plain(request) for cache, request in pairs):
            return compute_following(requests, caches)
        return torch.cat([self._run(request) for request in requests])

    def _run(self, request: RowRequest) -> Tensor:
        if request.mask != "exact":
            raise ConfigError("llama.cpp has no bottom-right mask; leave out --mask")
        cache = _cells(request.cache)
        request = self._narrowed(request)
        if request.observe is None:
            return cache.compute(request, self.wave_rows)
        queries = _Queries(len(self.layers) - 1)
        logits = cache.compute(request, self.wave_rows, queries.take)
        for layer in self.layers:
            request.observe(self._attention_call(layer, queries.of(layer), cache, request.run))
        return logits

    def _narrowed(self, request: RowRequest) -> RowRequest:
        """The rows that the narrowings leave. Each one runs its rows up to its layer for nothing but their KV there."""
        for narrowing in request.narrowings:
            kvs = _cells(request.cache).look(request, self.wave_rows, _Queries(narrowing.layer).take)
            rows = narrowing.choose(*kvs[narrowing.layer])
            ids = request.token_ids[:, torch.searchsorted(request.positions, rows)]
            request = replace(request, token_ids=ids, run=Run.read(rows), narrowings=())
        return request

    def append(self, token_ids: Tensor, cache: BlendedCache) -> Tensor:
        """Run tokens `[1, n]` right after the cache's rows (decoding, teacher forcing). Returns logits `[1, n, vocab]`."""
        return self.prefill([_following(token_ids, cache)])[None]

    def decode(self, token_ids: Sequence[Tensor], caches: Sequence[BlendedCache]) -> Tensor:
        """One decoding step of several sequences: a token `[1, 1]` each. Returns logits `[sequences, vocab]`."""
        pairs = zip(token_ids, caches, strict=True)
        return self.prefill([_following(ids, cache) for ids, cache in pairs])

    def run_whole(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cache: BlendedCache | None = None, **_: Any
    ) -> Any:
        """A forward pass as transformers' models do it. Returns logits `[1, n, vocab]` and the cache."""
        cache = cache or self.new_cache(input_ids.shape[1])
        start = cache.get_seq_length()
        run = Run.consecutive(start, start + input_ids.shape[1], input_ids.device)
        outputs = 1 if start == 0 else input_ids.shape[1]
        return ForwardOutput(
            logits=self.prefill([RowRequest(input_ids, run, cache, outputs=outputs)])[None], cache=cache
        )

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Compute in this thread alone."""
        with self.lock:
            yield

    @contextmanager
    def before_head(self, call: Callable[[], None]) -> Iterator[None]:
        """Call `call` behind the pass: llama.cpp does not say when it reaches the LM head."""
        yield
        call()


class ForwardOutput(dict[str, Any]):
    """What `run_whole` returns, as transformers' models do."""

    @property
    def logits(self) -> Tensor:
        """`[1, n, vocab]`."""
        logits: Tensor = self["logits"]
        return logits


class _Queries:
    """The queries of a pass, layer by layer; a pass of several batches shows each layer several times."""

    def __init__(self, last_layer: int) -> None:
        self._last = last_layer
        self._queries = defaultdict[int, list[Tensor]](list)

    def take(self, node: AttentionNode) -> bool:
        self._queries[node.layer].append(node.query)
        return node.layer < self._last

    def of(self, layer: int) -> Tensor:
        """`[heads, rows, head_dim]`."""
        return torch.cat(self._queries[layer], 1)


def _cells(cache: BlendedCache) -> CellCache:
    assert isinstance(cache, CellCache)
    return cache


def _is_plain(request: RowRequest) -> bool:
    """Whether nobody looks at its rows or chooses among them."""
    return request.observe is None and not request.narrowings and request.mask == "exact"


def _following(token_ids: Tensor, cache: BlendedCache) -> RowRequest:
    rows = token_ids.shape[1]
    start = cache.get_seq_length()
    return RowRequest(token_ids, Run.consecutive(start, start + rows, token_ids.device), cache, outputs=rows)
