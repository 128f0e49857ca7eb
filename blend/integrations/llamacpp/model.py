"""A GGUF file as llama.cpp loads it, and its tokenizer and configuration as transformers reads them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from blend.errors import ConfigError, UnsupportedModelError, first_line
from blend.integrations.llamacpp.library import Library
from blend.model.fingerprint import remembered_digest

_SPLIT = re.compile(r"-00001-of-(\d{5})\.gguf$")
_SAMPLE = "The harbour has 7 gates; each one, it's said, weighs 2.5 tonnes.\n  Größe: 10 µm"


class GGUFModel:
    """A model in a GGUF file. `close` frees it.

    Args:
        library: llama.cpp.
        file: the GGUF file; of a split one the first part.

    Attributes:
        handle: the library's pointer.
        window: how many last keys its windowed layers see; 0 without such layers.

    Raises:
        ConfigError: the file cannot be read.
        UnsupportedModelError: the model keeps something else than keys and values.

    """

    def __init__(self, library: Library, file: str | Path) -> None:
        self.library = library
        self.file = Path(file).expanduser()
        if not self.file.is_file():
            raise ConfigError(f"{file} is no file; name a GGUF file")
        self.name = str(self.file)
        parameters = library.call("llama_model_default_params")
        self.handle = library.call("llama_model_load_from_file", str(self.file).encode(), parameters)
        if not self.handle:
            raise ConfigError(
                f"llama.cpp cannot load {self.file}{library.logged_error()}; name a GGUF file that it supports"
            )
        self._vocab = library.call("llama_model_get_vocab", self.handle)
        self.vocabulary = int(library.call("llama_vocab_n_tokens", self._vocab))
        self.trained_context = int(library.call("llama_model_n_ctx_train", self.handle))
        self.window = int(library.call("llama_model_n_swa", self.handle))
        for kind in ("is_recurrent", "is_hybrid", "has_encoder"):
            if library.call(f"llama_model_{kind}", self.handle):
                raise UnsupportedModelError(
                    f"{self.file.name}: it keeps more than keys and values ({kind}), which llama.cpp cannot blend here; "
                    "use the model with transformers, or full prefill"
                )

    def close(self) -> None:
        """Free the model; its contexts must be closed before."""
        if self.handle:
            self.library.call("llama_model_free", self.handle)
            self.handle = None

    @cached_property
    def digest(self) -> str:
        """Of the bytes of its files."""
        return xxhash.xxh3_128_hexdigest("\n".join(map(remembered_digest, self._files())).encode())

    def _files(self) -> list[Path]:
        split = _SPLIT.search(self.file.name)
        if split is None:
            return [self.file]
        stem = self.file.name[: split.start()]
        return sorted(self.file.parent.glob(f"{stem}-?????-of-{split[1]}.gguf"))

    @cached_property
    def description(self) -> str:
        """What llama.cpp says of its kind, size and weights: "qwen2 1B Q4_K - Medium"."""
        text = ctypes.create_string_buffer(128)
        self.library.call("llama_model_desc", self.handle, text, len(text))
        return text.value.decode(errors="replace")

    @cached_property
    def layer_weights(self) -> int:
        """Numbers in the weights of all layers: without the table of embeddings, which may be the head, too."""
        numbers = int(self.library.call("llama_model_n_params", self.handle))
        embedding = self.vocabulary * int(self.library.call("llama_model_n_embd", self.handle))
        return max(1, numbers - embedding)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Its sizes as `llama-server` names them: tokens of the vocabulary, numbers and bytes of the weights."""
        numbers, nbytes = (int(self.library.call(f"llama_model_{name}", self.handle)) for name in ("n_params", "size"))
        return {"n_vocab": self.vocabulary, "n_params": numbers, "size": nbytes}

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        is_end = self.library.call
        return [token for token in range(self.vocabulary) if is_end("llama_vocab_is_eog", self._vocab, token)]

    def tokenize(self, text: str) -> list[int]:
        """The token ids of plain text, without special tokens."""
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 8))()
        count = self.library.call("llama_tokenize", self._vocab, raw, len(raw), ids, len(ids), False, False)
        return list(ids[:count])

    @cached_property
    def config(self) -> Any:
        """The configuration, as transformers reads it from the file. Raises `ConfigError`."""
        from transformers import AutoConfig

        return self._read(AutoConfig.from_pretrained).get_text_config(decoder=True)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer with its chat template, as transformers reads it from the file.

        Raises `ConfigError` where it cannot, or where its tokens differ from llama.cpp's.
        """
        from transformers import AutoTokenizer

        tokenizer = self._read(AutoTokenizer.from_pretrained)
        if tokenizer.encode(_SAMPLE, add_special_tokens=False) != self.tokenize(_SAMPLE):
            raise ConfigError(
                f"{self.file.name}: transformers reads its tokenizer otherwise than llama.cpp; pass a tokenizer directory"
            )
        return tokenizer

    def _read(self, read: Any) -> Any:
        try:
            return read(self.file.parent, gguf_file=self.file.name)
        except Exception as error:  # transformers raises anything for a file that it does not know
            reason = first_line(error)
            raise ConfigError(
                f"transformers cannot read {self.file.name} ({reason}); pass a tokenizer directory"
            ) from error
