"""Drives a HuggingFace decoder over chosen rows of prompts, through transformers' own extension points.

The model's modules do all the work. For the time of one pass, its attention goes through `row_attention`, its cache is a
`PassCache`, and pre-forward hooks narrow the rows at one layer. The model is left as found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blend.config import MaskMode
from blend.errors import UnsupportedModelError
from blend.model.cache import KV, cache_argument
from blend.model.cpu import FewRows, few_rows_pay_off
from blend.model.forward import (
    AttentionCall,
    ForwardPass,
    Halt,
    Narrowing,
    PassCache,
    PassLayer,
    RowRequest,
    row_attention,
    running,
)

ATTENTION_NAME = "kvblend_rows"
# The field behind `config._attn_implementation`. Writing it takes 0.1 ms with 24 layers; the public `set_attn_implementation`
# walks all modules and takes 5 ms.
ATTENTION_FIELD = "_attn_implementation_internal"
_LOCKS: WeakKeyDictionary[torch.nn.Module, AbstractContextManager[bool]] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()


class AttentionSwitch:
    """Routes the attention of one model through `row_attention` while a pass runs.

    Without the private field, the public setter is used.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        self._configs = [c for c in found.values() if hasattr(c, "_attn_implementation")]
        self._direct = all(hasattr(config, ATTENTION_FIELD) for config in self._configs)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Route attention through `row_attention`, then restore it.

        Raises `UnsupportedModelError` if the model's configuration does not take the new attention.
        """
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, row_attention)
        before = [config._attn_implementation for config in self._configs]
        whole = None if self._direct else _by_key(self._model.config)
        try:
            self._set([ATTENTION_NAME] * len(before), ATTENTION_NAME)
            self._require_switched()
            yield
        finally:
            self._set(before, whole)

    def _set(self, names: list[str | None], whole: Any) -> None:
        if not self._direct:
            self._model.set_attn_implementation(whole)
            return
        for config, name in zip(self._configs, names, strict=True):
            setattr(config, ATTENTION_FIELD, name)

    def _require_switched(self) -> None:
        left = next((c for c in self._configs if c._attn_implementation != ATTENTION_NAME), None)
        if left is not None:
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} leaves the attention of {type(left).__name__} at "
                f"{left._attn_implementation!r}, so it cannot be driven; use full prefill for this model"
            )


def _by_key(config: Any) -> Any:
    """The attention names of a configuration and its sub-configurations, as `set_attn_implementation` takes them."""
    inner = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    if not inner:
        return config._attn_implementation
    return {"": config._attn_implementation, **{key: _by_key(part) for key, part in inner.items()}}


@contextmanager
def narrowing_hooks(layers: torch.nn.ModuleList, forward: ForwardPass, cache: PassCache) -> Iterator[None]:
    """At each narrowing's layer, probe it, choose rows and keep only those, in later layers too."""
    narrower = _Narrower(sum(forward.counts))
    wanted = sorted({narrowing.layer for request in forward.requests for narrowing in request.narrowings})

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
    handles = [
        layer.register_forward_pre_hook(cut, with_kwargs=True, prepend=True) for layer in list(layers)[wanted[0] + 1 :]
    ]
    handles += [layers[index].register_forward_pre_hook(choose_at(index), with_kwargs=True) for index in wanted]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _turns(forward: ForwardPass, layer: int) -> int:
    """The largest number of narrowings that a request has at this layer."""
    return max(sum(n.layer == layer for n in request.narrowings) for request in forward.requests)


def _choose(forward: ForwardPass, layer: int, turn: int, fresh: KV) -> torch.Tensor:
    """Let the requests that narrow here choose. Returns the indices of all kept rows among the rows so far."""
    kept = []
    for number, (request, kv) in enumerate(zip(forward.requests, forward.fresh(*fresh), strict=True)):
        run, here = forward.runs[number], [n for n in request.narrowings if n.layer == layer]
        if turn < len(here):
            if here[turn].keep_kv:
                request.write(layer, run, *kv)
            kept.append(here[turn].choose(*kv))
        else:
            kept.append(run.positions)
    return forward.narrow(kept)


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


class _Narrower:
    """Cuts row-shaped arguments of a decoder layer (hidden states, cos and sin, position ids) to the kept rows.

    Arguments made before the first layer have all rows; hidden states have those that the last layer ran on. The number of rows
    of a tensor says which.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._index: dict[int, torch.Tensor] = {}
        self._done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, places: torch.Tensor) -> None:
        """From now on cut to the rows at these indices `[rows]` of the rows kept so far."""
        self._index = {rows: index[places] for rows, index in self._index.items()}
        self._index[self._rows] = places
        self._rows = places.shape[0]
        self._index.pop(self._rows, None)
        self._done.clear()

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a layer's forward pass, cut to the kept rows."""
        return tuple(map(self._value, args)), {name: self._value(value) for name, value in kwargs.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, tuple):
            return tuple(map(self._value, value))
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        dim = min(1, value.ndim - 1)
        index = self._index.get(value.shape[dim]) if value.ndim else None
        if index is None:
            return value
        # Every layer gets the same cos, sin and ids: cut them once. Keeping the original keeps its id unique.
        if id(value) not in self._done:
            self._done[id(value)] = (value, value.index_select(dim, index))
        return self._done[id(value)][1]


def _lock_of(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """The model's one lock, shared by all its drivers: a pass changes the model's attention for all of them."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, RLock())


class RowDriver:
    """Runs one HuggingFace decoder over chosen rows.

    model: the causal language model. layers: its decoder layers, in order. reads_caches: see `ForwardPass`; None until
    the first pass has found out.
    """

    def __init__(self, model: Any, layers: torch.nn.ModuleList) -> None:
        self.model = model
        self.layers = layers
        self.lock = _lock_of(model)
        self._few_rows = FewRows(model)
        self.reads_caches: bool | None = None
        self._switch = AttentionSwitch(model)
        self.cache_argument = cache_argument(model)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
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
    def prefill(self, requests: Sequence[RowRequest], *, mask: MaskMode = "exact") -> torch.Tensor:
        """Compute the rows of several prompts in one forward pass. Returns each one's next-token logits, `[prompts, vocab]`.

        The result of a prompt does not depend on the others. In the last layer all rows get KV, but only the last row of each
        prompt goes through attention and MLP.
        """
        logits: torch.Tensor = self.run([self._with_one_last_row(request) for request in requests], mask=mask).logits
        return logits[:, -1] if len(requests) == 1 else logits[0]

    def _with_one_last_row(self, request: RowRequest) -> RowRequest:
        last = Narrowing(len(self.layers) - 1, lambda keys, values: request.positions[-1:], keep_kv=True)
        return replace(request, narrowings=(*request.narrowings, last)) if request.positions.shape[0] > 1 else request

    def run(
        self,
        requests: Sequence[RowRequest],
        *,
        mask: MaskMode = "exact",
        halt_at: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the rows of these requests in one forward pass, and write each one's KV to its cache.

        Returns the model's output with logits `[batch, remaining rows, vocab]`, or None if the pass halted. halt_at: stop in
        this layer once its KV is written. Raises `ConfigError` for requests that cannot run together.
        """
        forward = ForwardPass(requests, mask, reads_caches=bool(self.reads_caches))
        cache = PassCache(forward, len(self.layers), halt_at)
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            stack.enter_context(self._switch.installed())
            stack.enter_context(running(forward))
            stack.callback(self._learn, forward)
            stack.enter_context(suppress(Halt))
            if few_rows_pay_off(forward.token_ids.numel(), self.device, self.dtype):
                stack.enter_context(self._few_rows)
            if any(request.narrowings for request in requests):
                stack.enter_context(narrowing_hooks(self.layers, forward, cache))
            return self.model(
                input_ids=forward.token_ids,
                position_ids=forward.position_ids,
                use_cache=True,
                **{self.cache_argument: cache},
                **model_kwargs,
            )

    def _learn(self, forward: ForwardPass) -> None:
        if self.reads_caches is None and forward.views:
            self.reads_caches = forward.unchanged

    def run_whole(self, **arguments: Any) -> Any:
        """The model's own forward pass, while no pass over rows changes the model."""
        with self.lock:
            return self.model(**arguments)

    def watch(self, request: RowRequest, last_layer: int) -> None:
        """Run rows to observe their attention, up to and including `last_layer`; KV is written."""

        def observe_and_halt(call: AttentionCall) -> None:
            if request.observe is not None:
                request.observe(call)
            if call.layer >= last_layer:
                raise Halt((call.key, call.value))

        self.run([replace(request, observe=observe_and_halt)])
