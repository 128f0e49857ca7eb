"""Switches a model's attention, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blend.errors import UnsupportedModelError

ATTENTION_NAME = "kvblend_rows"


class AttentionSwitch:
    """Routes the attention of one model through a function of transformers' `AttentionInterface` while a pass runs.

    It sets the configurations directly: `set_attn_implementation` walks all modules, which takes 5 ms.
    """

    def __init__(self, model: Any, attention: Callable[..., Any]) -> None:
        self._attention = attention
        modules = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
        found = {id(part): part for config in modules for part in _with_parts(config)}
        self._configs = [part for part in found.values() if hasattr(part, "_attn_implementation")]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Route attention through the function, then restore it.

        Raises `UnsupportedModelError` if the model's configuration does not take the new attention.
        """
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, self._attention)
        before = [config._attn_implementation for config in self._configs]
        try:
            self._set([ATTENTION_NAME] * len(before))
            left = next((c for c in self._configs if c._attn_implementation != ATTENTION_NAME), None)
            if left is not None:
                raise UnsupportedModelError(
                    f"transformers {transformers.__version__} leaves the attention of {type(left).__name__} at "
                    f"{left._attn_implementation!r}, so it cannot be driven; use full prefill for this model"
                )
            yield
        finally:
            self._set(before)

    def _set(self, names: list[str | None]) -> None:
        for config, name in zip(self._configs, names, strict=True):  # a whole before its parts, which it sets as well
            config._attn_implementation = name


def _with_parts(config: Any) -> Iterator[Any]:
    """A configuration and all configurations in it."""
    yield config
    for key in getattr(config, "sub_configs", ()):
        if (part := getattr(config, key, None)) is not None:
            yield from _with_parts(part)
