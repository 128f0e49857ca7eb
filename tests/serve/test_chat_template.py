"""A prompt is what transformers makes of the same text or conversation."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from blend.serve.text import ChatTemplate

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<g>": 3, "hello": 4, "world": 5}
BEGIN = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
OPENINGS = {
    "no special tokens": (None, ()),
    "a template": (BEGIN, (1,)),
    "as Llama 3": (processors.Sequence([processors.ByteLevel(), BEGIN]), (1,)),
    "two tokens": (
        processors.TemplateProcessing(single="<g> <s> $A", special_tokens=[("<s>", 1), ("<g>", 3)]),
        (3, 1),
    ),
    "one at each end": (processors.BertProcessing(("</s>", 2), ("<s>", 1)), (1,)),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_a_text_to_be_continued_begins_as_the_tokenizer_begins_it(tmp_path: Path, name: str) -> None:
    post_processor, opening = OPENINGS[name]
    core = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if post_processor is not None:
        core.post_processor = post_processor
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    ids = ChatTemplate(tokenizer, ()).continued(("hello world",)).token_ids
    assert ids == (*opening, 4, 5)
    assert tokenizer("hello world").input_ids[: len(ids)] == list(ids)
