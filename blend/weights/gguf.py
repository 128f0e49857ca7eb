"""One GGUF file to a HuggingFace model directory, through transformers' own GGUF loading.

Imports torch and transformers when it is called.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from blend.errors import WeightsError

_NEEDED = ("gguf", "accelerate")
_SAME_TABLE = 0.98  # mean cosine of two quantisations of one table; independent tables are near 0
_COMPARED_ROWS = 20_000


def require_converter() -> None:
    """Raise `WeightsError` when a package that the conversion needs is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise WeightsError(f"{' and '.join(missing)} needed to convert weights: run `pip install 'kvblend[offline]'`")


def convert_gguf(source: Path, target: Path, dtype: str = "bfloat16") -> None:
    """Write model and tokenizer of `source` to the directory `target` as safetensors in `dtype`.

    GGUF files may hold the shared table of embeddings and LM head twice, in two quantisations; the model gets the finer
    one, the head's, for both and is tied again. Raises `WeightsError` when the file cannot be converted.
    """
    require_converter()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet():
            where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
            tokenizer = AutoTokenizer.from_pretrained(**where)
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            _tie_again(model)
            _forget_quantisation(model)
            model.to(getattr(torch, dtype)).save_pretrained(target)
            tokenizer.save_pretrained(target)
    except (ValueError, KeyError, IndexError, RuntimeError, ImportError) as error:
        first = str(error).partition("\n")[0]
        raise WeightsError(f"transformers cannot convert {source.name} ({first}): try another version of it") from error


def _tie_again(model: Any) -> None:
    import torch

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.data_ptr() == head.data_ptr() or embedding.shape != head.shape:
        return
    with torch.no_grad():
        rows = slice(_COMPARED_ROWS)
        alike = torch.nn.functional.cosine_similarity(embedding[rows], head[rows], dim=-1).mean()
        if alike > _SAME_TABLE:
            embedding.copy_(head)
            model.config.tie_word_embeddings = True
            model.tie_weights()


def _forget_quantisation(model: Any) -> None:
    # The weights are plain now; what is left of the quantiser would be saved and make loading expect GGUF.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(StringIO()):  # the loader draws a bar of its own, which no setting turns off
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
