"""A decoder without a tokenizer takes prompts of token ids, and says so where it is asked for text."""

import pytest
from blends import filled, greedy_by_transformers
from models import decoder

from blend import BlendConfig, Decoder, PromptLayout, PromptTemplate, generate
from blend.errors import ConfigError, PromptError

LAYOUT = PromptLayout.of_chunks((1, 2, 3), ((4, 5, 6, 7), (8, 9, 10, 11)), (12, 13))
DECODER = Decoder(decoder("llama").model)


def test_token_ids_in_token_ids_out():
    blend = filled(DECODER, LAYOUT, BlendConfig(ratio=1.0)).prefill(LAYOUT)
    answer = generate(DECODER, blend, LAYOUT.token_ids, max_new_tokens=3, eos_token_id=None)
    assert answer.token_ids == greedy_by_transformers(DECODER, LAYOUT.token_ids, 3)
    assert answer.text == ""


def test_text_is_refused_in_words():
    blend = filled(DECODER, LAYOUT).prefill(LAYOUT)
    with pytest.raises(ConfigError, match="no tokenizer"):
        generate(DECODER, blend, LAYOUT.token_ids, on_text=lambda text: None)
    with pytest.raises(PromptError, match="PromptLayout"):
        PromptTemplate(DECODER.tokenizer)
