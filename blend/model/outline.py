"""What a model's configuration says without its weights."""

from __future__ import annotations

from functools import partial
from statistics import mean
from typing import Any

from blend.errors import ConfigError, first_line
from blend.weights.catalog import here_or_from_hub


def auto_class(config: Any) -> Any:
    """The class of transformers that builds a configuration's model: for text, or for images and text (Ministral 3)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers import AutoModelForCausalLM as ForText
    from transformers import AutoModelForImageTextToText as ForImagesToo

    kind = type(config)
    sees = kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return ForImagesToo if sees else ForText


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer where layers differ (Gemma 4), else the one of all."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def query_numbers(config: Any) -> float:
    """Query heads times head dimension, the mean of all layers."""
    sizes = []
    for layer in layer_configs(config):
        heads = getattr(layer, "num_attention_heads", 1)
        head_dim = getattr(layer, "head_dim", None)
        sizes.append(heads * (head_dim or getattr(layer, "hidden_size", 0) // heads))
    return mean(sizes)


def read_config(location: str, name: str) -> Any:
    """The configuration of a model directory or HuggingFace id; nothing else is read. Raises `ConfigError`."""
    from transformers import AutoConfig

    try:
        return here_or_from_hub(location, partial(AutoConfig.from_pretrained, location))
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes transformers raise
        reason = first_line(error)[:200]
        raise ConfigError(
            f"cannot read the configuration of {name!r} ({reason}); pass a model directory or id"
        ) from None
