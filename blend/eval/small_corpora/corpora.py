"""Small corpora out of a seed: 1 to 12 documents of 10 to 600 tokens, of ten kinds in turn, for `scripts/sweep_small_corpora`.

Where a blend goes wrong it does so on corpora that are too small, or too odd, for what is fitted on them.
"""

from __future__ import annotations

import math
import random

from blend.eval.small_corpora.texts import LANGUAGES, Tokenizer, document

CORPUS_TOKENS = 400  # of most corpora; one in ten may have as many as it draws
KINDS = (
    "long among short",
    "prose",
    "near-duplicates",
    "odd language",
    "code",
    "tables",
    "numbers",
    "mixture",
    "facts",
    "other language",
)


def corpus(number: int, seed: int, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """The kind of the corpus with this number, and its documents. The first is a long note among three short ones."""
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    if number == 0:
        return kind, [document("facts", tokens, rng, tokenizer) for tokens in (21, 21, 21, 152)]
    lengths = _lengths(kind, rng, math.inf if rng.random() < 0.1 else CORPUS_TOKENS)
    if kind == "near-duplicates":
        base = document(rng.choice(("prose", "facts")), max(lengths), rng, tokenizer)
        return kind, [_changed(base, rng) for _ in lengths]
    kinds = _kinds(kind, len(lengths), rng)
    return kind, [document(one, tokens, rng, tokenizer) for one, tokens in zip(kinds, lengths, strict=True)]


def _lengths(kind: str, rng: random.Random, tokens: float) -> list[int]:
    """Tokens of each document: short ones are as frequent as long ones in the logarithm."""
    count = rng.randint(1, 12)
    if kind == "long among short":
        lengths = [*(rng.randint(10, 30) for _ in range(max(count, 2) - 1)), rng.randint(120, 600)]
        rng.shuffle(lengths)
    else:
        lengths = [round(10 * 60 ** rng.random()) for _ in range(count)]
    while len(lengths) > 2 and sum(lengths) > tokens and kind != "long among short":
        lengths.remove(max(lengths))
    return lengths


def _kinds(kind: str, count: int, rng: random.Random) -> list[str]:
    """What each document of a corpus is made of."""
    every = ("prose", "facts", "code", "table", "numbers", *LANGUAGES)
    if kind == "odd language":
        kinds = [rng.choice(("prose", "facts"))] * (count - 1) + [rng.choice(tuple(LANGUAGES))]
        rng.shuffle(kinds)
        return kinds
    if kind in ("mixture", "long among short"):
        return [rng.choice(every) for _ in range(count)]
    return [{"tables": "table", "other language": rng.choice(tuple(LANGUAGES))}.get(kind, kind)] * count


def _changed(text: str, rng: random.Random) -> str:
    """The text with a word in twelve replaced by another of its words."""
    words = text.split(" ")
    return " ".join(rng.choice(words) if rng.random() < 1 / 12 else word for word in words)
