"""A plan's bytes are those that a store takes, to the byte, for whatever codec is registered."""

from collections import Counter

import pytest
import transformers
from cases import make_layout
from models import BASE, FAMILIES, decoder

from blend.chunks.library import ChunkLibrary
from blend.chunks.surrogate import with_surrogate
from blend.config import CorpusConfig
from blend.errors import ConfigError, UnsupportedModelError
from blend.model.outline import ModelOutline, outline
from blend.plan import CorpusSize, corpus_bytes, stated
from blend.store import codec_names, open_store
from blend.types import CacheIdentity, CacheKind

PREFIX = tuple(range(3, 12))


def outlined(family: str) -> ModelOutline:
    known = FAMILIES[family]
    return outline(getattr(transformers, known.config)(**{**BASE, **known.options}), family)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3", "gemma3n", "gemma4", "gpt-neox", "deepseek-v3"])
def test_an_outline_has_the_shapes_that_the_model_turns_out_to_have(family: str) -> None:
    found, admitted = outlined(family), decoder(family)
    assert found.keys == tuple(layer.key_shape for layer in admitted.rotations)
    assert found.values == tuple(layer.value_shape for layer in admitted.rotations)
    assert found.parameters == sum(part.numel() for part in admitted.model.parameters())


def test_the_operations_are_those_of_the_rows() -> None:
    """Twice the parameters that a row meets, and 4 a pair, query head and head dimension, counted by hand."""
    found = outlined("llama")
    assert found.operations(10, 5) == 10 * found.row_operations + (50 + 55) * found.pair_operations
    hidden, inside, heads = BASE["hidden_size"], BASE["intermediate_size"], BASE["num_attention_heads"]
    layer = hidden * hidden * 2 + hidden * hidden // 2 * 2 + 3 * hidden * inside + 2 * hidden
    assert found.row_operations == 2 * (BASE["num_hidden_layers"] * layer + hidden)
    assert found.pair_operations == 4 * BASE["num_hidden_layers"] * heads * (hidden // heads)


def test_a_row_meets_its_share_of_the_experts() -> None:
    """Two of four experts."""
    found = outlined("mixtral")
    experts = BASE["num_hidden_layers"] * 4 * 3 * BASE["hidden_size"] * BASE["intermediate_size"]
    ends = 2 * BASE["vocab_size"] * BASE["hidden_size"]
    assert found.row_operations == 2 * (found.parameters - ends - experts / 2)


@pytest.mark.parametrize("codec", codec_names())
def test_a_plan_weighs_what_the_store_does(codec: str) -> None:
    tiny = decoder("llama")
    lengths = [7, 16, 16, 31, 32, 32, 9, 32, 24, 32, 17, 32, 32, 32, 11, 32, 32]
    chunks = make_layout(chunks=lengths).chunks
    store = open_store("memory:", codec=codec)
    library = with_surrogate(ChunkLibrary(tiny, store, PREFIX), chunks, 40)
    library.compute(library.variants(chunks))
    assert library.surrogate
    variants = library.variants(chunks)
    isolated, contextual = (
        Counter(len(one.chunk) for one in variants if one.kind is kind)
        for kind in (CacheKind.ISOLATED, CacheKind.CONTEXTUAL)
    )
    behind = sum(map(len, library.surrogate))
    size = CorpusSize(isolated, contextual, len(PREFIX), behind)
    assert corpus_bytes(size, outlined("llama"), codec, "float32") == store.stats().nbytes


def test_given_numbers_are_the_corpus_that_would_be_made() -> None:
    config = CorpusConfig()
    found = stated(1000, 200_000, config)
    assert (found.chunks, found.tokens, found.surrogate) == (1000, 200_000, 400)
    assert (found.isolated, found.contextual) == ({200: 1000}, {200: 998})
    assert stated(4, 800, config).contextual == {}  # too few to take one out
    assert stated(1000, 200_000, CorpusConfig(surrogate_tokens=0)).contextual == {}
    assert stated(1000, 200_000, CorpusConfig(surrogate_text="Something.")).contextual == {200: 1000}
    with pytest.raises(ConfigError, match="--chunk-tokens 256"):
        stated(10, 3000, config)


def test_a_model_without_a_kv_cache_is_refused() -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=90)
    with pytest.raises(UnsupportedModelError, match="mamba keeps no KV cache that could be planned for"):
        outline(config, "mamba")


def test_names_of_entries_have_one_length() -> None:
    """Weighing one entry stands for all: the header holds names of a fixed length."""
    keys = [CacheIdentity(model, "float32", (1, 2)).key((3,)) for model in ("a", "b" * 64)]
    assert len({(len(key.namespace), len(key.digest)) for key in keys}) == 1
