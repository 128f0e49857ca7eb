"""Drives a HuggingFace decoder over chosen rows of prompts, through transformers' own extension points.

The model's modules do all the work. For the time of one pass, its attention goes through `row_attention`, its cache consists of
`PassLayer`s, and pre-forward hooks narrow the rows at one layer. `ForwardPass` holds the state that they share. The model is
left as found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from inspect import signature
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blend.errors import UnsupportedModelError
from blend.model.cache import KV, cache_argument
from blend.model.fused import FusedModules
from blend.model.mixers import split_mixers
from blend.model.passes import DrivenPass, ForwardPass, Halt, Narrower, Narrowing, RowRequest
from blend.model.recurrent import LayerState

ATTENTION_NAME = "kvblend_rows"
# Arguments of other kinds of attention; a model that passes one is refused.
_UNSUPPORTED = ("position_bias", "alibi", "block_mask", "head_mask")


class PassLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of the cache that the model sees during a pass: its KV goes to the caches of the pass's requests.

    halts: `update` writes the KV, then ends the pass with `Halt`. probing: `update` raises `Halt` before it writes.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, forward: DrivenPass, index: int, *, halts: bool = False) -> None:
        super().__init__()
        self._forward = forward
        self._index = index
        self._halts = halts
        self.probing = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the requests' caches allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        """Write the rows' fresh KV. Returns the KV for the model's attention."""
        written = None if self.probing else self._forward.write(self._index, key_states, value_states)
        if written is None or self._halts:
            raise Halt((key_states, value_states))
        return written

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys of the longest request, and their offset; no mask is built from it."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Rows in use before this pass, of the longest request."""
        return self._forward.length(self._index)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


_running: ContextVar[DrivenPass | None] = ContextVar("kvblend_forward_pass", default=None)


@contextmanager
def running(forward: DrivenPass) -> Iterator[None]:
    """Make `forward` the current pass of this thread and task."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


def row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of the current pass's rows, with the signature of transformers' `AttentionInterface`.

    The pass comes from a context variable: not every architecture hands keyword arguments of the forward pass to attention.
    Returns `[batch, rows, heads, value_dim]` and no weights.
    """
    forward = _running.get()
    if forward is None:
        raise RuntimeError("row_attention runs only inside a kvblend forward pass")
    if attention_mask is not None or any(options.get(name) is not None for name in _UNSUPPORTED):
        raise UnsupportedModelError(
            f"{type(module).__name__} adds its own mask or bias to attention, which blended prefill cannot reproduce; "
            "use full prefill for this model"
        )
    layer = int(getattr(module, "layer_idx", -1))
    rule = {"window": sliding_window, "softcap": softcap, "scale": scaling, "sinks": s_aux}
    return forward.attend(layer, query, (key, value), rule), None


_LOCKS: WeakKeyDictionary[torch.nn.Module, AbstractContextManager[bool]] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()


@contextmanager
def narrowing_hooks(layers: torch.nn.ModuleList, forward: ForwardPass, cache: Cache) -> Iterator[None]:
    """At each narrowing's layer, probe it, choose rows and keep only those, in later layers too."""
    narrower = Narrower(sum(forward.counts))
    narrowed_layers = sorted({narrowing.layer for request in forward.requests for narrowing in request.narrowings})

    def cut(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return narrower.cut(args, kwargs)

    def choose_at(index: int) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for turn in range(_turns(forward, index)):
                fresh = _probe(module, args, kwargs, cache.layers[index])
                narrower.keep(_choose(forward, index, turn, fresh))
                args, kwargs = narrower.cut(args, kwargs)
            return args, kwargs

        return hook

    # A user's hooks see arguments of equal length: cutting runs before them, choosing after them.
    later = list(layers)[narrowed_layers[0] + 1 :]
    handles = [layer.register_forward_pre_hook(cut, with_kwargs=True, prepend=True) for layer in later]
    for index in narrowed_layers:
        handles.append(layers[index].register_forward_pre_hook(choose_at(index), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _turns(forward: ForwardPass, layer: int) -> int:
    """The largest number of narrowings that a request has at this layer."""
    turns = [sum(narrowing.layer == layer for narrowing in request.narrowings) for request in forward.requests]
    return max(turns)


def _choose(forward: ForwardPass, layer: int, turn: int, fresh: KV) -> Tensor:
    """Let the requests that narrow here choose. Returns the indices of all kept rows among the rows so far."""
    positions = []
    kvs = forward.fresh(*fresh)
    for request, run, kv in zip(forward.requests, forward.runs, kvs, strict=True):
        here = [narrowing for narrowing in request.narrowings if narrowing.layer == layer]
        if turn >= len(here):
            positions.append(run.positions)
            continue
        if here[turn].keep_kv:
            request.write(layer, run, *kv)
        positions.append(here[turn].choose(*kv))
    return forward.narrow(positions)


def _probe(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layer: PassLayer) -> KV:
    """The layer's fresh KV of the current rows, without writing it or running attention and MLP.

    Calls `forward` directly: the layer's hooks have run on these arguments and would change them twice. Hooks of modules inside
    the layer run twice, here and for the kept rows.
    """
    layer.probing = True
    try:
        module.forward(*args, **kwargs)
    except Halt as halt:
        return halt.fresh
    finally:
        layer.probing = False
    raise AssertionError("the layer never updated the cache")


def _lock_of(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """The model's one lock, shared by all its drivers: a pass changes the model's attention for all of them."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, RLock())


class AttentionSwitch:
    """Routes the attention of one model through a function of transformers' `AttentionInterface` while a pass runs.

    It sets the configurations directly: `set_attn_implementation` walks all modules, which takes 5 ms.
    """

    def __init__(self, model: Any, attention: Callable[..., Any]) -> None:
        self._attention = attention
        configs = [getattr(module, "config", None) for module in model.modules()]
        distinct = {id(part): part for config in configs if config is not None for part in _with_parts(config)}
        self._configs = [config for config in distinct.values() if hasattr(config, "_attn_implementation")]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Route attention through the function, then restore it.

        Raises `UnsupportedModelError` if the model's configuration does not take the new attention.
        """
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, self._attention)
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:  # a whole before its parts, which it sets as well
                config._attn_implementation = ATTENTION_NAME
            for config in self._configs:
                if config._attn_implementation != ATTENTION_NAME:
                    raise UnsupportedModelError(
                        f"transformers {transformers.__version__} leaves the attention of {type(config).__name__} at "
                        f"{config._attn_implementation!r}, so it cannot be driven; use full prefill for this model"
                    )
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name


def _with_parts(config: Any) -> Iterator[Any]:
    """A configuration and all configurations in it."""
    yield config
    for key in getattr(config, "sub_configs", ()):
        if (part := getattr(config, key, None)) is not None:
            yield from _with_parts(part)


class RowDriver:
    """Runs one HuggingFace decoder over chosen rows.

    Attributes:
        model: the causal language model.
        config: the configuration of its text part.
        layers: its decoder layers, in order.
        kv_layers: how many of them, from the first on, keep something; the others read their KV. Admission sets it.
        lock: held by the thread that runs the model.
        reads_caches: see `ForwardPass`; None before the first pass.
        recurrent: its layers with a recurrent state, by index. Admission sets it.
        last_row_only: forward arguments that compute the LM head for the last row only; empty if the model has none.
        fused: kernels in place of small modules; none on a CPU.

    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.layers = decoder_layers(model, self.config)
        self.kv_layers = len(self.layers)
        self.lock = _lock_of(model)
        self.reads_caches: bool | None = None
        self.recurrent: Mapping[int, LayerState] = {}
        self.cache_argument = cache_argument(model)
        self.last_row_only = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
        self.fused = FusedModules()
        self._switch = AttentionSwitch(model, row_attention)

    @property
    def device(self) -> torch.device:
        """The device of the model and of its caches."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        return self.model.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @torch.inference_mode()
    def prefill(self, requests: Sequence[RowRequest]) -> Tensor:
        """Compute the rows of several prompts in one forward pass.

        The result of a prompt does not depend on the others. In the last layer that keeps KV all rows get it, but only the
        last rows of each prompt, whose logits are wanted, go through its attention and MLP and through later layers. With
        recurrent layers all rows run through all layers.

        Returns:
            Logits of each request's last `outputs` rows, one request after another, `[rows, vocab]`; of a batch those of each
            sequence's last row.

        """
        narrowed = requests if self.recurrent else [self._with_last_rows(request) for request in requests]
        output = self.run(narrowed)
        logits: Tensor = output.logits
        is_batch = requests[0].token_ids.shape[0] > 1
        return logits[:, -1] if is_batch else logits[0]

    def _with_last_rows(self, request: RowRequest) -> RowRequest:
        if request.outputs == request.run.rows:
            return request
        last_rows = request.positions[-request.outputs :]
        narrowing = Narrowing(self.kv_layers - 1, lambda keys, values: last_rows, keep_kv=True)
        return replace(request, narrowings=(*request.narrowings, narrowing))

    def run(self, requests: Sequence[RowRequest], *, halt_at: int | None = None) -> Any:
        """Run the rows of these requests in one forward pass, and write each one's KV to its cache.

        Args:
            requests: the rows.
            halt_at: the layer to stop in, once its KV is written.

        Returns:
            The model's output with logits `[batch, remaining rows, vocab]`, with recurrent layers of the rows whose logits are
            wanted alone; or None if the pass halted.

        """
        shares_kv = self.kv_layers < len(self.layers)
        forward = ForwardPass(requests, reads_caches=bool(self.reads_caches), shares_kv=shares_kv)
        layers = [PassLayer(forward, index, halts=index == halt_at) for index in range(self.kv_layers)]
        cache = Cache(layers=layers)
        arguments: dict[str, Any] = {self.cache_argument: cache}
        with ExitStack() as stack:
            stack.enter_context(self.driven(forward))
            if self.reads_caches is None:
                stack.callback(self._learn, forward)
            stack.enter_context(suppress(Halt))
            if any(request.narrowings for request in requests):
                stack.enter_context(narrowing_hooks(self.layers, forward, cache))
            if self.recurrent:
                stack.enter_context(split_mixers(self.recurrent, forward))
                arguments["logits_to_keep"] = forward.last_rows()
            return self.model(
                input_ids=forward.token_ids, position_ids=forward.position_ids, use_cache=True, **arguments
            )

    @contextmanager
    def driven(self, forward: DrivenPass) -> Iterator[None]:
        """Let `forward` do the model's attention, in this thread alone."""
        with self.lock, self._switch.installed(), self.fused.installed(), running(forward):
            yield

    def _learn(self, forward: ForwardPass) -> None:
        if forward.has_written:
            self.reads_caches = forward.unchanged

    def run_whole(self, **arguments: Any) -> Any:
        """The model's own forward pass, while no pass over rows changes the model."""
        with self.lock:
            return self.model(**arguments)


def decoder_layers(model: Any, config: Any) -> torch.nn.ModuleList:
    """The list of modules whose length is the decoder's depth."""
    depth = getattr(config, "num_hidden_layers", None)
    base = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = [module for module in base.modules() if isinstance(module, torch.nn.ModuleList)]
    lists = [modules for modules in lists if len(modules) == depth]
    if not lists:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {depth} decoder layers to drive; use full prefill for this model"
        )
    return lists[0]
