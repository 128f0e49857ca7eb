"""Who decides where a model is split over several processes: the first of them leads, and the others follow.

The leader alone has the store, chooses rows and encodes chunks, all over keys and values of all heads. Whatever it does with
the model, a pass, a layer's end, a write, it tells the others first. So all processes take part in the same passes in the same
order, whatever becomes of the store, and caches in the store are whole: the same for any number of processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from blend.errors import first_line
from blend.integrations.vllm.contract import LoadFailedError, ModelRefusedError, Site
from blend.integrations.vllm.rows_batch import PromptRows
from blend.integrations.vllm.rows_check import refusal
from blend.integrations.vllm.rows_group import Done, Group, Layer, Logits, Write, group_of
from blend.integrations.vllm.rows_worker import RowModel, RowPass, See
from blend.model.forward import Halt

_LOG = logging.getLogger("vllm.kvblend")
_PLAIN = (LoadFailedError, ModelRefusedError, ValueError)  # errors that mean something to who calls a stage
_Result = TypeVar("_Result")


class Role(Protocol):
    """What a process does of what all processes of a model do together. model: it runs the rows of those that decide."""

    model: RowModel

    def does(self, call: Callable[[], _Result]) -> _Result | None:
        """Called by all processes. What `call` gives in the one that decides; None in the others, which raise as it does."""


def role_of(site: Site) -> Role:
    """Of this process. Raises ValueError, in words that follow "cannot recompute rows,", in all processes or in none."""
    if why := refusal(site):
        raise ValueError(f"because {why}")
    if site.config.parallel_config.tensor_parallel_size == 1:
        return Alone(RowModel(site))
    group, why = group_of(site), ""
    role: Role | None = None
    try:
        role = Leader(site, group) if group.leads else Follower(site, group)
    except ValueError as error:
        why = str(error)
    why = group.agreed(why)
    if role is None or why:
        raise ValueError(why)
    return role


class Alone:
    """The only process."""

    def __init__(self, model: RowModel) -> None:
        self.model = model

    def does(self, call: Callable[[], _Result]) -> _Result:
        """See `Role`."""
        return call()


class Leader:
    """The first process: it decides."""

    def __init__(self, site: Site, group: Group) -> None:
        self.model: RowModel = LeadingModel(site, group)
        self._group = group

    def does(self, call: Callable[[], _Result]) -> _Result:
        """See `Role`."""
        try:
            result = call()
        except Exception as error:
            self._group.tell(Done(_sendable(error)))
            raise
        self._group.tell(Done())
        return result


class LeadingModel(RowModel):
    """The model of all processes, for the first of them. `see` is given all heads, of queries where the pass looks at them."""

    def __init__(self, site: Site, group: Group) -> None:
        super().__init__(site)
        self._group = group
        self._halted = False

    def run(self, rows: RowPass, see: See) -> torch.Tensor | None:
        """As its base does; what `see` raises ends the pass of all processes."""

        def seen(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
            gathered = self._group.gathered(key, value, *([query] if rows.queries else []))
            keys, values = map(self._group.once, gathered[:2])
            try:
                see(index, gathered[2] if rows.queries else query, keys, values)
            except BaseException:
                self._halted = True
                self._group.tell(Layer.HALT)
                raise
            self._group.tell(Layer.GO_ON)

        self._halted = False
        self._group.tell(_on_cpu(rows))
        try:
            return super().run(rows, seen)
        except Exception as error:
            if self._halted:
                raise
            _lost(error)

    @torch.inference_mode()
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """As its base does, in all processes."""
        self._group.tell(Write(layer, slots.cpu(), keys.shape, values.shape, keys.dtype))
        keys, values = self._group.spread(keys), self._group.spread(values)
        super().write(layer, self._group.own(keys), self._group.own(values), slots)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As its base does."""
        self._group.tell(Logits(hidden.shape, hidden.dtype))
        try:
            return super().logits(self._group.spread(hidden.contiguous()))
        except Exception as error:
            _lost(error)


class Follower:
    """Any other process: it does what it is told."""

    def __init__(self, site: Site, group: Group) -> None:
        self.model, self._group = RowModel(site), group

    def does(self, call: Callable[[], _Result]) -> None:
        """See `Role`."""
        try:
            done = self._follow()
        except Exception as error:
            _lost(error)
        if done.error is not None:
            raise done.error

    @torch.inference_mode()
    def _follow(self) -> Done:
        while not isinstance(told := self._group.hear(), Done):
            if isinstance(told, RowPass):
                self.model.run(told, self._seen(told))
            elif isinstance(told, Logits):
                self.model.logits(self._given(told.shape, told.dtype))
            else:
                self._write(told)
        return told

    def _seen(self, rows: RowPass) -> See:
        def see(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
            self._group.gathered(key, value, *([query] if rows.queries else []))
            while not isinstance(told := self._group.hear(), Layer):
                self._write(told)
            if told is Layer.HALT:
                raise Halt((key, value))

        return see

    def _write(self, told: Write) -> None:
        keys, values = self._given(told.keys, told.dtype), self._given(told.values, told.dtype)
        slots = told.slots.to(self.model.site.device)
        self.model.write(told.layer, self._group.own(keys), self._group.own(values), slots)

    def _given(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self._group.spread(torch.empty(shape, dtype=dtype, device=self.model.site.device))


def _on_cpu(rows: RowPass) -> RowPass:
    """To be told: the others put it on their own devices."""
    prompts = tuple(PromptRows(positions.cpu(), tuple(blocks)) for positions, blocks in rows.prompts)
    return rows._replace(token_ids=rows.token_ids.cpu(), prompts=prompts)


def _sendable(error: Exception) -> Exception:
    """Without what other processes cannot read of it, or need not know."""
    kind: Any = type(error) if type(error) in _PLAIN else LoadFailedError
    return kind(first_line(error))  # type: ignore[no-any-return]


def _lost(error: Exception) -> NoReturn:
    """The process has left a pass that others are in. They wait for it for ever, unless it ends, and the engine with it."""
    _LOG.critical(
        "kvblend: a pass failed in one process of the model, which ends: %s", first_line(error), exc_info=error
    )
    raise SystemExit(1) from error
