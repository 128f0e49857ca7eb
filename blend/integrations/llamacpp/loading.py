"""Loads a GGUF file as the decoder of `Rag(engine="llamacpp")` and `--engine llamacpp`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from blend.errors import ConfigError
from blend.integrations.llamacpp.context import ContextOptions
from blend.integrations.llamacpp.decoder import CellDecoder

_FIELDS = {field.name: type(field.default) for field in fields(ContextOptions)}


def load_decoder(model: str, options: Mapping[str, Any]) -> CellDecoder:
    """The model in a GGUF file.

    Args:
        model: the file.
        options: fields of `ContextOptions`; `library`, a path of llama.cpp's library; `tokenizer`, a directory of one;
            `wave_rows`, as of `CellDecoder`.

    Raises:
        ConfigError: unknown options, or what `CellDecoder` raises.
        UnsupportedModelError: the model cannot be blended.

    """
    types = {**_FIELDS, "library": str, "tokenizer": str, "wave_rows": int}
    for name, value in options.items():
        if name not in types:
            raise ConfigError(f"llama.cpp has no option {name!r}; choose among {', '.join(types)}")
        if type(value) is not types[name]:
            raise ConfigError(f"the option {name} of llama.cpp is {value!r}; give {_words(types[name])}")
    chosen = ContextOptions(**{name: value for name, value in options.items() if name in _FIELDS})
    tokenizer = None
    if options.get("tokenizer"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options["tokenizer"])
    decoder = CellDecoder.load(model, chosen, library=options.get("library", ""), tokenizer=tokenizer)
    decoder.wave_rows = max(1, options.get("wave_rows", decoder.wave_rows))
    return decoder


def _words(kind: type) -> str:
    return "a whole number" if kind is int else "a text"
