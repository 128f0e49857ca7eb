"""A decoder without a tokenizer takes prompts of token ids, and says so where it is asked for text."""

import pytest
import torch

from blend import BlendConfig, Blender, Decoder, PromptLayout, PromptTemplate, generate, open_store
from blend.errors import ConfigError, PromptError
from tests.models import FAMILIES, build

LAYOUT = PromptLayout.of_chunks((1, 2, 3), ((4, 5, 6, 7), (8, 9, 10, 11)), (12, 13))


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(build(FAMILIES["llama"]))


def test_token_ids_in_token_ids_out(decoder):
    blender = Blender(decoder, open_store("memory:"))
    library = blender.library(LAYOUT.prefix)
    library.compute(library.missing(LAYOUT.chunks))
    blend = blender.prefill(LAYOUT, config=BlendConfig(ratio=1.0))
    answer = generate(decoder, blend, LAYOUT.token_ids, max_new_tokens=3)
    whole = decoder.model.generate(torch.tensor([LAYOUT.token_ids]), max_new_tokens=3, do_sample=False)
    assert list(answer.token_ids) == whole[0, LAYOUT.rows :].tolist()
    assert answer.text == ""


def test_text_is_refused_in_words(decoder):
    blender = Blender(decoder, open_store("memory:"))
    with pytest.raises(ConfigError, match="no tokenizer"):
        generate(decoder, blender.prefill(LAYOUT), LAYOUT.token_ids, on_text=lambda text: None)
    with pytest.raises(PromptError, match="PromptLayout"):
        PromptTemplate(decoder.tokenizer)
