"""Adapters of a model (PEFT's): which of them compute, and with what factors.

Adapters are switched, scaled, merged and turned off without a change of any weight. Caches belong to the adapters that computed
them, so their state is a part of the model's fingerprint.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


class AdapterState:
    """The state of a model's adapters when this was made.

    A layer with adapters is known by the property that PEFT gives it, `disable_adapters`. Its state are all settings that are
    plain values.

    Attributes:
        words: the state; "" for a model without adapters.

    """

    def __init__(self, model: torch.nn.Module) -> None:
        layers = {name: module for name, module in model.named_modules() if _has_adapters(module)}
        self._before = [(vars(module), dict(_settings(module))) for module in layers.values()]
        pairs = zip(layers, self._before, strict=True)
        self.words = "; ".join(f"{name} {sorted(settings.items())}" for name, (_, settings) in pairs)

    @property
    def changed(self) -> bool:
        """Whether an adapter was switched, scaled, merged or turned off or on since."""
        return any(values.get(name) != before for values, settings in self._before for name, before in settings.items())


def _has_adapters(module: torch.nn.Module) -> bool:
    return isinstance(getattr(type(module), "disable_adapters", None), property)


def _settings(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and _is_plain(value):
            yield name, copy.deepcopy(value)


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or a list or a mapping of these."""
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    return isinstance(value, _PLAIN)
