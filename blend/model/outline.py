"""What a model's configuration says about sizes, without its weights: the shapes of its KV, and what a forward pass costs.

The model is built without memory for its parameters (torch's meta device) and shown one token, so the shapes are those of its
own code, whatever the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

from blend.errors import ConfigError, UnsupportedModelError
from blend.weights.catalog import here_or_from_hub

if TYPE_CHECKING:
    from blend.model.recurrent import LayerState

Shape = tuple[int, int]
Operator = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class ModelOutline:
    """Sizes of one model.

    keys, values: for each layer KV heads and head dimension. row_operations, pair_operations: floating-point operations of
    one row in all layers, and of one row looking at one key there (2 a parameter; 4 a query head and head dimension).
    parameters: numbers in the weights. context: longest prompt, or None. operators: of each layer, the numbers of the tensors
    of a chunk's operator, those of convolutions in the decoder's dtype and the others in float32; empty without recurrent
    layers.
    """

    name: str
    keys: tuple[Shape, ...]
    values: tuple[Shape, ...]
    row_operations: float
    pair_operations: float
    parameters: int
    context: int | None
    operators: tuple[Operator, ...] = ()

    def operator_bytes(self, itemsize: int) -> int:
        """Bytes of a chunk's operators, however long the chunk is. itemsize: of the decoder's dtype."""
        return sum(itemsize * sum(conv) + 4 * sum(rest) for conv, rest in self.operators)

    @property
    def kv_numbers(self) -> int:
        """Numbers of a token's keys and values in all layers."""
        return sum(heads * width for heads, width in (*self.keys, *self.values))

    def operations(self, rows: int, behind: int = 0) -> float:
        """Of computing rows behind so many others in one pass, each looking at itself and all before it."""
        pairs = rows * behind + rows * (rows + 1) / 2
        return rows * self.row_operations + pairs * self.pair_operations


def auto_class(config: Any) -> Any:
    """The class of transformers that builds a configuration's model: for text, or for images and text (Ministral 3)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers import AutoModelForCausalLM as ForText
    from transformers import AutoModelForImageTextToText as ForImagesToo

    kind = type(config)
    sees = kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return ForImagesToo if sees else ForText


def outline(config: Any, name: str) -> ModelOutline:
    """Of a transformers configuration. Raises `UnsupportedModelError` for a model that cannot be built or keeps no KV cache."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from blend.model.admission import check_layer_kinds, layers_kept
    from blend.model.cache import output_cache

    inner = config.get_text_config(decoder=True)
    check_layer_kinds(inner, name)
    built = (
        inner if type(inner) in MODEL_FOR_CAUSAL_LM_MAPPING else config
    )  # without what sees images, where that can be
    try:
        with torch.device("meta"), torch.inference_mode(), _unchecked():
            # The dtype that every kernel of transformers takes; nothing is computed in it.
            model = auto_class(built).from_config(built, dtype=torch.bfloat16).eval()
            found = output_cache(model(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True))
        kept = layers_kept(found.layers, inner)  # the last ones may read the KV of others
        layers = [_shapes(layer) for layer, own in zip(found.layers, kept, strict=True) if own]
        if not any(heads for (heads, _), _ in layers):
            raise ValueError("no layer has keys and values")
        operators = _operators(model, inner, len(layers))
    except Exception as error:  # whatever the model's own code raises on tensors without memory
        reason = str(error).strip().partition("\n")[0][:200]
        raise UnsupportedModelError(f"{name} keeps no KV cache that could be planned for ({reason})") from error
    return ModelOutline(
        name,
        tuple(keys for keys, _ in layers),
        tuple(values for _, values in layers),
        2.0 * _used_by_a_row(model, inner),
        4.0 * query_numbers(inner) * sum(keys[0] > 0 for keys, _ in layers),
        sum(part.numel() for part in model.parameters()),
        getattr(inner, "max_position_embeddings", None),
        operators,
    )


def _shapes(layer: Any) -> tuple[Shape, Shape]:
    """KV heads and head dimension of a layer's keys and values; zeros without KV."""
    if getattr(layer, "keys", None) is None:
        return (0, 0), (0, 0)
    keys, values = layer.keys.shape, layer.values.shape
    return (keys[1], keys[3]), (values[1], values[3])


def _operators(model: Any, config: Any, depth: int) -> tuple[Operator, ...]:
    """Sizes of each layer's operator, measured on its recurrent parts with random weights."""
    import torch

    from blend.model.cache import cache_argument
    from blend.model.forward import decoder_layers
    from blend.model.mixers import BEFORE, MEASURED, find_mixers

    def run(cache: Any) -> None:
        with torch.device("meta"):
            ids = torch.zeros((1, BEFORE + MEASURED), dtype=torch.long)
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})

    with torch.inference_mode():
        found = find_mixers(list(decoder_layers(model, config)), config, run)
    return operator_sizes(found, depth)


def operator_sizes(recurrent: Mapping[int, LayerState], depth: int) -> tuple[Operator, ...]:
    """The sizes of each layer's operator, from the recurrent layers of a model; see `ModelOutline`."""
    if not recurrent:
        return ()
    found = list[Operator]()
    for index in range(depth):
        one = recurrent.get(index)
        sizes, conv = ([*map(math.prod, one.operator_shapes)], len(one.conv)) if one is not None else ([], 0)
        found.append((tuple(sizes[:conv]), tuple(sizes[conv:])))
    return tuple(found)


@contextmanager
def _unchecked() -> Iterator[None]:
    """Without the checks of values in torch's distributions, which Gemma 3n uses: tensors without memory have none."""
    from torch.distributions import Distribution

    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(__debug__)


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer where layers differ (Gemma 4), else the one of all."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def query_numbers(config: Any) -> float:
    """Query heads times head dimension, the mean of all layers."""
    sizes = []
    for layer in layer_configs(config):
        heads = getattr(layer, "num_attention_heads", 1)
        sizes.append(heads * (getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // heads))
    return mean(sizes)


def _used_by_a_row(model: Any, config: Any) -> float:
    """Parameters that a row is multiplied with: not those of token tables and the head, and its share of the experts'."""
    from torch.nn import Embedding

    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), 1)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    outside = [module for module in model.modules() if isinstance(module, Embedding)]
    outside.append(model.get_output_embeddings())
    ends = {id(part) for module in outside if module is not None for part in module.parameters()}
    inside = [(name, part.numel()) for name, part in model.named_parameters() if id(part) not in ends]
    return float(sum(count * (share if ".experts." in name else 1) for name, count in inside))


def read_tokenizer(location: str, name: str) -> Any:
    """The tokenizer of a model directory or HuggingFace id. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, location, f"the tokenizer of {name!r}", "give --chunks and --tokens instead")


def read_config(location: str, name: str) -> Any:
    """The configuration of a model directory or HuggingFace id; nothing else is read. Raises `ConfigError`."""
    from transformers import AutoConfig

    return _read(AutoConfig, location, f"the configuration of {name!r}", "pass a model directory or id")


def _read(kind: Any, location: str, what: str, remedy: str) -> Any:
    try:
        return here_or_from_hub(location, partial(kind.from_pretrained, location))
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes transformers raise
        reason = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(f"cannot read {what} ({reason}); {remedy}") from None
