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
_UNCHOSEN = ("auto", "native", "cpu")  # how transformers computes by default, and what is true of all


def read_engine_options(text: str) -> Mapping[str, Any]:
    """An engine's options out of a JSON object; "" for none. Raises `ConfigError`."""
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError('--engine-options is a JSON object, such as {"threads": 4}')
    return options


def check_engine(engine: str, computing: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an engine that is not known, and for options of transformers with another one.

    computing: how transformers computes, by the names of `Rag`'s arguments.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine is {engine!r}; choose among {', '.join(ENGINES)}")
    if engine == TRANSFORMERS:
        return
    for name, value in computing.items():
        if value not in _UNCHOSEN:
            option = name.replace("_", "-")
            raise ConfigError(
                f"{option} {value} is for transformers, and a GGUF file says itself what it computes in: leave it out with "
                f"the engine {engine}"
            )


def load_engine(engine: str, model: str, engine_options: Mapping[str, Any]) -> Decoder:
    """A model in another engine than transformers, which offers what a `Decoder` does.

    Raises `ConfigError` for unknown options, and as the engine does.
    """
    return cast("Decoder", import_module(_LOADERS[engine]).load_decoder(model, engine_options))
