"""One forward pass of a HuggingFace decoder over chosen rows of a prompt, driven through transformers' own doors.

The model's modules do all the work. What is ours: an attention function that knows the rows' positions (`attention`), a cache
that writes fresh rows in place (`cache`), and pre-forward hooks that narrow the rows at one layer (`narrowing`). The model is
left as found.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from blend.config import MaskMode
from blend.model.attention import AttentionCall
from blend.model.cache import Halt, PassCache, cache_argument
from blend.model.few_rows import FewRows, worth_it
from blend.model.narrowing import narrowing_hooks
from blend.model.rows import ForwardPass, Narrowing, RowRequest, running
from blend.model.switch import AttentionSwitch

_LOCKS: WeakKeyDictionary[torch.nn.Module, AbstractContextManager[bool]] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()


def _lock_of(model: torch.nn.Module) -> AbstractContextManager[bool]:
    """The lock of this model, one however many drivers it has: a pass over rows changes its attention for all of them."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, RLock())


class RowDriver:
    """Runs one HuggingFace decoder over chosen rows.

    model: the causal language model. layers: its decoder layers, in order. one_copy: see `ForwardPass`; None until
    the first pass has shown it.
    """

    def __init__(self, model: Any, layers: torch.nn.ModuleList) -> None:
        self.model = model
        self.layers = layers
        self.lock = _lock_of(model)
        self._few_rows = FewRows(model)
        self.one_copy: bool | None = None
        self._switch = AttentionSwitch(model)
        self.cache_argument = cache_argument(model)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.model.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @torch.inference_mode()
    def prefill(self, requests: Sequence[RowRequest], *, mask: MaskMode = "exact") -> torch.Tensor:
        """Compute the rows of several prompts in one forward pass; next-token logits of each, `[prompts, vocab]`.

        What each gets is what it gets alone. In the last layer all rows get their KV, but only the last one of each prompt goes
        through attention and MLP: nothing reads the others' output.
        """
        logits: torch.Tensor = self.run([self._ending_in_one_row(request) for request in requests], mask=mask).logits
        return logits[:, -1] if len(requests) == 1 else logits[0]

    def _ending_in_one_row(self, request: RowRequest) -> RowRequest:
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
        """Run the rows of these requests in one forward pass, each over its own cache, which their KV is written to.

        halt_at: stop in this layer as soon as its KV is written; nothing is returned then. Returns the model's output, logits
        `[batch, rows that are left, vocab]`. Raises `ConfigError` for several requests that cannot run together.
        """
        forward = ForwardPass(requests, mask, one_copy=bool(self.one_copy))
        cache = PassCache(forward, len(self.layers), halt_at)
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            stack.enter_context(self._switch.installed())
            stack.enter_context(running(forward))
            stack.callback(self._learn, forward)
            stack.enter_context(suppress(Halt))
            if worth_it(forward.token_ids.numel(), self.device, self.dtype):
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
        if self.one_copy is None and forward.handed:
            self.one_copy = forward.untouched

    def run_whole(self, **arguments: Any) -> Any:
        """The model's own forward pass, untouched, at a time when no pass over rows changes the model."""
        with self.lock:
            return self.model(**arguments)

    def watch(self, request: RowRequest, last_layer: int) -> None:
        """Run rows only to have their attention observed, up to and including `last_layer`; KV is written."""

        def observe_and_halt(call: AttentionCall) -> None:
            if request.observe is not None:
                request.observe(call)
            if call.layer >= last_layer:
                raise Halt((call.key, call.value))

        self.run([replace(request, observe=observe_and_halt)])
