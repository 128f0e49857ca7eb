"""Runs a HuggingFace decoder over chosen rows of prompts, through transformers' own extension points.

The rows of several prompts lie one after another in one flat sequence; every prompt keeps its own cache. The model's modules do
all the work. For the time of one pass, its attention goes through `row_attention`, its cache consists of `PassLayer`s, and
pre-forward hooks narrow the rows at one layer. `ForwardPass` holds the state that they share. The model is left as found.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from blend.config import MaskMode
from blend.errors import ConfigError, UnsupportedModelError
from blend.model.attention import AttentionCall
from blend.model.cache import KV, BlendedCache, Run, cache_argument
from blend.model.mixers import split_mixers
from blend.model.narrower import Narrower
from blend.model.recurrent import LayerState, Operator
from blend.model.switch import AttentionSwitch
from blend_kernels import decode_attention

if TYPE_CHECKING:
    from blend.model.graphs import RowGraphs

# Arguments of other kinds of attention; a model that passes one is refused.
_UNSUPPORTED = ("position_bias", "alibi", "block_mask", "head_mask")


@dataclass(frozen=True)
class Narrowing:
    """Continue with fewer rows of a prompt from `layer` on.

    choose: gets the layer's fresh keys and values of all current rows, `[1, kv_heads, rows, head_dim]`, and returns the sorted
    positions to keep. Only the layer's norm and QKV projection run before. keep_kv: write the fresh KV of dropped rows.
    """

    layer: int
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keep_kv: bool = False


@dataclass(frozen=True)
class RowRequest:
    """Rows of one prompt that a forward pass computes.

    token_ids: `[batch, rows]`; a batch shares positions and has the pass to itself. positions: sorted int64 `[rows]`.
    cache: holds the KV of every earlier row that these rows see; their own is written to it. narrowings: by ascending layer.
    observe: called with every layer's attention before it is computed; an exception from it ends the pass.
    await_layer: called with a layer's index before that layer of `cache` is used; it returns when the stored KV is there.
    outputs: of how many last rows the logits are wanted. on_operator: gets the operator of these rows in each recurrent layer;
    they must be consecutive. run: what the host knows of the positions; without it they are read.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cache: BlendedCache
    narrowings: tuple[Narrowing, ...] = ()
    observe: Callable[[AttentionCall], None] | None = None
    await_layer: Callable[[int], None] | None = None
    outputs: int = 1
    on_operator: Callable[[int, Operator], None] | None = None
    run: Run | None = None

    @classmethod
    def of(cls, token_ids: torch.Tensor, run: Run, cache: BlendedCache, **more: Any) -> RowRequest:
        """Rows of which the host knows something."""
        return cls(token_ids, run.positions, cache, run=run, **more)

    def write(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Write fresh KV into a layer of the cache, once its stored KV is there; see `BlendedLayer.write_rows`."""
        if self.await_layer is not None:
            self.await_layer(layer)
        return self.cache.layers[layer].write_rows(run, keys, values)  # type: ignore[no-any-return]


class Resume(Enum):
    """How to go on with steps that have no rows to run.

    BACKGROUND: in any thread; what follows may wait for a store. ENGINE: in the thread that runs the decoder.
    NEXT_TURN: in that thread, after other prompts had a pass; what follows runs the decoder itself.
    """

    BACKGROUND = "background"
    ENGINE = "engine"
    NEXT_TURN = "next_turn"


_Result = TypeVar("_Result")
RowSteps = Generator[RowRequest, torch.Tensor, _Result]
"""Work of the decoder that a scheduler interleaves: yields rows to run, is sent their logits, ends with a result."""
Steps = Generator[RowRequest | Resume, torch.Tensor, _Result]
"""`RowSteps` that may also wait for a store or run the decoder itself.

How to drive it: start it in the decoder's thread. For a `RowRequest`, run the rows, alone or in one pass with rows of other
prompts, and `send` the logits; if they could not be run, `throw` the error in. For a `Resume`, call `next` where and when it
says. `close` it when the result is no longer wanted; that may wait for the store.
"""


@dataclass(frozen=True)
class LayerQuery:
    """What a layer's attention computes for the rows of a pass.

    layer: the model's index of the layer. query: `[batch, heads, rows, head_dim]`. key, value: as the model hands them on.
    rule: window, softcap, scale and sinks, as in `AttentionCall`.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rule: Mapping[str, Any]


class DrivenPass(Protocol):
    """What a running pass does in place of the model's cache and attention."""

    def length(self, layer: int) -> int:
        """Rows in use in a layer before this pass, of the longest prompt."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Write a layer's fresh KV `[batch, kv_heads, rows, head_dim]`. Returns the KV that the model's attention gets."""

    def attend(self, attention: LayerQuery) -> torch.Tensor:
        """Attention of the rows, `[batch, rows, heads, value_dim]`."""


class ForwardPass:
    """A `DrivenPass` over several requests, and the rows of each that are still computed.

    reads_caches: the model hands KV from its cache to its attention unchanged. Attention over several prompts then reads their
    caches in place instead of one concatenated copy. unchanged: whether that held for every layer of this pass so far.
    shares_kv: later layers may be handed the KV of earlier ones.
    """

    def __init__(
        self,
        requests: Sequence[RowRequest],
        mask: MaskMode = "exact",
        *,
        reads_caches: bool = False,
        shares_kv: bool = False,
    ) -> None:
        if len(requests) > 1 and (mask != "exact" or any(request.token_ids.shape[0] != 1 for request in requests)):
            raise ConfigError(
                "prompts run together only one sequence each and under the exact mask; run them one by one"
            )
        self.requests = tuple(requests)
        self.mask = mask
        self.reads_caches = reads_caches
        self.runs = [request.run or Run.read(request.positions) for request in requests]
        self.unchanged = True
        self._shares_kv = shares_kv
        # What the cache returned to the model, and each request's own KV: of the last layer, or of all that others may read.
        self._written: list[tuple[KV, list[KV]]] = []

    @property
    def counts(self) -> list[int]:
        """Rows of each request."""
        return [run.rows for run in self.runs]

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids of all rows that the requests started with, `[batch, rows]`."""
        return torch.cat([request.token_ids for request in self.requests], dim=1)

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of all rows still computed, `[batch, rows]`."""
        flat = torch.cat([run.positions for run in self.runs])
        return flat.expand(self.requests[0].token_ids.shape[0], -1)

    def spans(self) -> Iterator[slice]:
        """Where each request's rows lie in the flat sequence."""
        ends = list(accumulate(self.counts, initial=0))
        return map(slice, ends, ends[1:])

    def last_rows(self) -> torch.Tensor:
        """Where the rows lie whose logits are wanted, int64 indices into the flat sequence."""
        spans = zip(self.requests, self.spans(), strict=True)
        device = self.runs[0].positions.device
        return torch.cat(
            [torch.arange(span.stop - request.outputs, span.stop, device=device) for request, span in spans]
        )

    def fresh(self, keys: torch.Tensor, values: torch.Tensor) -> list[KV]:
        """KV of all rows `[batch, kv_heads, rows, head_dim]`, request by request."""
        return [(keys[:, :, span], values[:, :, span]) for span in self.spans()]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Write a layer's fresh KV into each request's cache. Returns the KV that the model's attention gets."""
        pairs = zip(self.requests, self.runs, self.fresh(keys, values), strict=True)
        views = [request.write(layer, run, *kv) for request, run, kv in pairs]
        if len(views) == 1:
            returned = views[0]
        elif self.reads_caches:
            returned = keys, values  # recognised by `keys_and_values`, which gives attention the caches
        else:
            returned = torch.cat([k for k, _ in views], 2), torch.cat([v for _, v in views], 2)
        if not self._shares_kv:
            self._written.clear()
        self._written.append((returned, views))
        return returned

    @property
    def has_written(self) -> bool:
        """Whether a layer's KV was written."""
        return bool(self._written)

    def length(self, layer: int) -> int:
        """Rows in use in a layer before this pass, of the longest request."""
        return max(int(request.cache.layers[layer].length) for request in self.requests)

    def attend(self, attention: LayerQuery) -> torch.Tensor:
        """Attention of the rows, request by request, `[batch, rows, heads, value_dim]`."""
        parts = zip(
            self.requests, self.runs, self.spans(), self.keys_and_values(attention.key, attention.value), strict=True
        )
        out = [self._attend_one(attention, request, run, span, *kv) for request, run, span, kv in parts]
        return torch.cat(out, dim=1) if len(out) > 1 else out[0].contiguous()

    def _attend_one(
        self,
        attention: LayerQuery,
        request: RowRequest,
        run: Run,
        span: slice,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        rows, rule = attention.query[:, :, span], attention.rule
        observed, on_gpu = request.observe is not None, rows.is_cuda
        plain = not on_gpu and rule["softcap"] is None and rule["sinks"] is None
        if plain and run.rows == 1 and run.ends and run.stop == keys.shape[2] and not observed:
            return decode_attention(rows, keys, values, window=rule["window"], scale=rule["scale"]).transpose(1, 2)
        call = AttentionCall(attention.layer, rows, keys, values, run.positions, self.mask, **rule, shared=run.shared)
        if request.observe is None:
            return call.output().transpose(1, 2)
        if not on_gpu:
            request.observe(call)
            return call.output().transpose(1, 2)
        output, lse = call.output_and_lse()  # so that what is observed reads the keys once
        request.observe(replace(call, lse=lse))
        return output.transpose(1, 2)

    def keys_and_values(self, keys: torch.Tensor, values: torch.Tensor) -> list[KV]:
        """Keys and values of each request, from those that the model passed to its attention."""
        for returned, views in reversed(self._written):
            if all(map(same_memory, returned, (keys, values))):
                return views
        self.unchanged = False
        lengths = [k.shape[2] for k, _ in self._written[-1][1]] if self._written else []
        if sum(lengths) != keys.shape[2] or (self.reads_caches and len(lengths) > 1):
            raise RuntimeError("the model's attention was not called with the KV of the layer that was just written")
        return list(zip(torch.split(keys, lengths, 2), torch.split(values, lengths, 2), strict=True))

    def narrow(self, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keep these sorted positions of each request. Returns their indices among the rows so far, int64 `[rows kept]`."""
        places = []
        for number, (span, rows) in enumerate(zip(list(self.spans()), kept, strict=True)):
            places.append(torch.searchsorted(self.runs[number].positions, rows) + span.start)
            run = self.runs[number]
            if rows is not run.positions:
                self.runs[number] = Run(rows, None, run.stop, ends=run.ends)
        return torch.cat(places)


def same_memory(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are the same numbers at the same addresses."""
    return mine is theirs or (
        mine.data_ptr() == theirs.data_ptr() and mine.shape == theirs.shape and mine.stride() == theirs.stride()
    )


class Halt(BaseException):
    """Ends a forward pass from inside a layer, with the layer's fresh KV; the driver catches it."""

    def __init__(self, fresh: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.fresh = fresh


class PassLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of the cache that the model sees during a pass: its KV goes to the caches of the pass's requests.

    halts: `update` writes the KV, then ends the pass with `Halt`. probing: `update` raises `Halt` before it writes.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, forward: DrivenPass, index: int, *, halts: bool = False) -> None:
        super().__init__()
        self._forward, self._index, self._halts = forward, index, halts
        self.probing = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the requests' caches allocate."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the current pass's rows, with the signature of transformers' `AttentionInterface`.

    The pass comes from a context variable: not every architecture hands keyword arguments of the forward pass to attention.
    Returns `[batch, rows, heads, value_dim]` and no weights.
    """
    forward = _running.get()
    if forward is None:
        raise RuntimeError("row_attention runs only inside a kvblend forward pass")
    if attention_mask is not None or any(others.get(name) is not None for name in _UNSUPPORTED):
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a mask or bias of its own to attention, which blended prefill cannot reproduce; "
            "use full prefill for this model"
        )
    rule = {"window": sliding_window, "softcap": softcap, "scale": scaling, "sinks": s_aux}
    return forward.attend(LayerQuery(int(getattr(module, "layer_idx", -1)), query, key, value, rule)), None


_LOCKS: WeakKeyDictionary[torch.nn.Module, AbstractContextManager[bool]] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()


@contextmanager
def narrowing_hooks(layers: torch.nn.ModuleList, forward: ForwardPass, cache: Cache) -> Iterator[None]:
    """At each narrowing's layer, probe it, choose rows and keep only those, in later layers too."""
    narrower = Narrower(sum(forward.counts))
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


def _lock_of(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """The model's one lock, shared by all its drivers: a pass changes the model's attention for all of them."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, RLock())


class RowDriver:
    """Runs one HuggingFace decoder over chosen rows.

    model: the causal language model. config: of its text part. layers: its decoder layers, in order. kv_layers: how many of
    them, from the first on, keep something; the others read their KV. All until admission has found out. lock: held by the
    thread that runs the model. reads_caches: see `ForwardPass`; None until the first pass has found out. recurrent: its layers
    with a recurrent state, by index; none until admission has found out. graphs: passes that a GPU repeats, or None.
    """

    graphs: RowGraphs | None = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.layers = decoder_layers(model, self.config)
        self.kv_layers = len(self.layers)
        self.lock = _lock_of(model)
        self.reads_caches: bool | None = None
        self.recurrent: Mapping[int, LayerState] = {}
        self.cache_argument = cache_argument(model)
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
    def prefill(self, requests: Sequence[RowRequest], *, mask: MaskMode = "exact") -> torch.Tensor:
        """Compute the rows of several prompts in one forward pass.

        The result of a prompt does not depend on the others. In the last layer that keeps KV all rows get it, but only the
        last rows of each prompt, whose logits are wanted, go through its attention and MLP and through later layers. With
        recurrent layers all rows run through all layers.

        Returns:
            Logits of each request's last `outputs` rows, one request after another, `[rows, vocab]`; of a batch those of each
            sequence's last row.

        """
        if self.graphs is not None and (replayed := self.graphs.logits(requests, mask)) is not None:
            return replayed
        return self.prefill_eagerly(requests, mask)

    @torch.inference_mode()
    def prefill_eagerly(self, requests: Sequence[RowRequest], mask: MaskMode = "exact") -> torch.Tensor:
        """`prefill` without graphs."""
        given = requests if self.recurrent else [self._with_last_rows(request) for request in requests]
        logits: torch.Tensor = self.run(given, mask=mask, last_rows=bool(self.recurrent)).logits
        return logits[:, -1] if requests[0].token_ids.shape[0] > 1 else logits[0]

    def _with_last_rows(self, request: RowRequest) -> RowRequest:
        if request.positions.shape[0] == request.outputs:
            return request
        last = Narrowing(self.kv_layers - 1, lambda keys, values: request.positions[-request.outputs :], keep_kv=True)
        return replace(request, narrowings=(*request.narrowings, last))

    def run(
        self,
        requests: Sequence[RowRequest],
        *,
        mask: MaskMode = "exact",
        halt_at: int | None = None,
        last_rows: bool = False,
    ) -> Any:
        """Run the rows of these requests in one forward pass, and write each one's KV to its cache.

        Returns the model's output with logits `[batch, remaining rows, vocab]`, or None if the pass halted. halt_at: stop in
        this layer once its KV is written. last_rows: give only the logits that the requests want. Raises `ConfigError` for
        requests that cannot run together.
        """
        shares_kv = self.kv_layers < len(self.layers)
        forward = ForwardPass(requests, mask, reads_caches=bool(self.reads_caches), shares_kv=shares_kv)
        cache = Cache(layers=[PassLayer(forward, i, halts=i == halt_at) for i in range(self.kv_layers)])
        with ExitStack() as stack:
            stack.enter_context(self.driven(forward))
            stack.callback(self._learn, forward)
            stack.enter_context(suppress(Halt))
            if any(request.narrowings for request in requests):
                stack.enter_context(narrowing_hooks(self.layers, forward, cache))
            arguments: dict[str, Any] = {self.cache_argument: cache}
            if self.recurrent:
                stack.enter_context(split_mixers(self.recurrent, forward))
            if last_rows:
                arguments["logits_to_keep"] = forward.last_rows()
            return self.model(
                input_ids=forward.token_ids, position_ids=forward.position_ids, use_cache=True, **arguments
            )

    @contextmanager
    def driven(self, forward: DrivenPass) -> Iterator[None]:
        """Let `forward` do the model's attention, in this thread alone."""
        with self.lock, self._switch.installed(), running(forward):
            yield

    def _learn(self, forward: ForwardPass) -> None:
        if self.reads_caches is None and forward.has_written:
            self.reads_caches = forward.unchanged

    def run_whole(self, **arguments: Any) -> Any:
        """The model's own forward pass, while no pass over rows changes the model."""
        with self.lock:
            return self.model(**arguments)


def decoder_layers(model: Any, config: Any) -> torch.nn.ModuleList:
    """The list of modules whose length is the decoder's depth."""
    depth = getattr(config, "num_hidden_layers", None)
    base = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = [m for m in base.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth]
    if not lists:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {depth} decoder layers to drive; use full prefill for this model"
        )
    return lists[0]
