"""Tokenizers of several kinds, and chunks and prose for messages."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any, NamedTuple

from blend.serve.passages.known import HeadFilter, KnownTexts
from blend.serve.passages.rendered import Renderer
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from blend.prompt import PromptTemplate

WORDS = re.findall(
    r"\w+",
    "the pump of a kettle boils water while harbour pilots read their charts by night and engineers measure pressure in "
    "every valve before winter comes with rain over narrow streets where bakers carry bread",
)


class Given(NamedTuple):
    """A chunk."""

    id: str
    title: str
    text: str


def prose(seed: int, words: int = 90) -> str:
    """Sentences in one line, the same for the same seed."""
    rng = random.Random(seed)
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        sentences.append(" ".join(rng.choices(WORDS, k=rng.randint(5, 12))).capitalize() + ".")
    return " ".join(sentences)


def _byte_level(vocabulary: int) -> Tokenizer:
    core = Tokenizer(BPE())
    # Newlines may join the punctuation before them, as with Qwen: a chunk's last sign and its closing are one token.
    words = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([prose(seed) + "\n\n" for seed in range(40)] + [".\n\n"] * 50, trainer)
    return core


def _sentencepiece() -> Tokenizer:
    """As Llama 2's: a mark for every space, one in front of the text, bytes for what has no token."""
    chars = sorted({char for word in WORDS for char in word} | {"▁", ".", "\n"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *chars, "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    core = Tokenizer(BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def _words() -> Tokenizer:
    core = Tokenizer(WordLevel({"<unk>": 0, **{word: i + 1 for i, word in enumerate(sorted(set(WORDS)))}}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return core


@cache
def tokenizer(kind: str) -> Any:
    """One of `KINDS`, or "bytes", which gives every byte a token, or one of `WHOLE_ONLY`."""
    if kind == "python":
        return ByT5Tokenizer(extra_ids=0)
    core = {
        "bytes": lambda: _byte_level(256),
        "byte-level": lambda: _byte_level(420),
        "normalised": lambda: _byte_level(420),
        "sentencepiece": _sentencepiece,
        "words": _words,
    }[kind]()
    if kind == "normalised":
        core.normalizer = normalizers.NFC()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>" if kind == "words" else None)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


KINDS = ("byte-level", "normalised", "sentencepiece")
WHOLE_ONLY = ("words", "python")  # whose tokens do not spell the text, or lie nobody knows where


def known(made: Any, *chunks: Given, heads: HeadFilter | None = None) -> KnownTexts:
    """These chunks, as prompts of this tokenizer have them."""
    texts = KnownTexts(Renderer(PromptTemplate(made), made), heads)
    texts.update(chunks)
    return texts
