"""Hooks of others on a model, which may change what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class HookWatch:
    """The forward hooks on a model's modules when this was made, without those by which transformers only collects outputs.

    PEFT chooses the adapter of each prompt of a batch by hooks, and users steer models by them. Rows that were computed without
    such hooks are then not the model's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.modules())
        self.present = set(self._hooks())

    @property
    def changed(self) -> bool:
        """Whether there are others now."""
        return set(self._hooks()) != self.present

    def _hooks(self) -> Iterator[Any]:
        """The number of each hook, which torch gives once."""
        for module in self._modules:
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for number, hook in hooks.items() if hooks else ():
                    if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                        yield number
