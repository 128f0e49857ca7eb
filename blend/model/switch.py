"""Switching the attention of a HuggingFace model for the time of one forward pass, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blend.errors import UnsupportedModelError
from blend.model.attention import row_attention

ATTENTION_NAME = "kvblend_rows"

# What `config._attn_implementation` reads. Written directly: the public `set_attn_implementation` walks all modules on every
# call; there and back takes 5 ms with 24 layers on one core, against 0.1 ms.
_FIELD = "_attn_implementation_internal"


class AttentionSwitch:
    """Routes the attention of one model through `row_attention` while a pass runs.

    Where transformers has no private field to write, the public setter is used instead.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        self._configs = [c for c in found.values() if hasattr(c, "_attn_implementation")]
        self._direct = all(hasattr(config, _FIELD) for config in self._configs)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Route attention through `row_attention`, and restore what was there afterwards.

        Raises `UnsupportedModelError` where the model's configuration does not take it.
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
            setattr(config, _FIELD, name)

    def _require_switched(self) -> None:
        left = next((c for c in self._configs if c._attn_implementation != ATTENTION_NAME), None)
        if left is not None:
            raise UnsupportedModelError(
                f"transformers {transformers.__version__} leaves the attention of {type(left).__name__} at "
                f"{left._attn_implementation!r}, so it cannot be driven; use full prefill for this model"
            )


def _by_key(config: Any) -> Any:
    """The attention of a configuration and of those in it, as `set_attn_implementation` takes it."""
    inner = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    if not inner:
        return config._attn_implementation
    return {"": config._attn_implementation, **{key: _by_key(part) for key, part in inner.items()}}
