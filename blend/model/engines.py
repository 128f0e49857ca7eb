"""Engines other than transformers that compute in this process, found by name: this package knows none of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from blend.errors import ConfigError

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

TRANSFORMERS = "transformers"
_LOADERS = {"llamacpp": "blend.integrations.llamacpp.loading"}
ENGINES = (TRANSFORMERS, *_LOADERS)


def read_engine_options(text: str) -> Mapping[str, Any]:
    """An engine's options out of a JSON object; "" for none. Raises `ConfigError`."""
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError('--engine-options is a JSON object, such as {"threads": 4}')
    return options


def check_engine(engine: str) -> None:
    """Raise `ConfigError` for an engine that is not known."""
    if engine not in ENGINES:
        raise ConfigError(f"engine is {engine!r}; choose among {', '.join(ENGINES)}")


def load_engine(engine: str, model: str, engine_options: Mapping[str, Any]) -> Decoder:
    """A model in another engine than transformers, which offers what a `Decoder` does.

    Raises `ConfigError` for unknown options, and as the engine does.
    """
    check_engine(engine)
    return cast("Decoder", import_module(_LOADERS[engine]).load_decoder(model, engine_options))
