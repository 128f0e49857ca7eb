"""Kinds of words that tokens are part of: a cheap proxy for named entities, by spelling alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

KINDS = ("capitalised", "number", "punctuation", "other")


def word_kinds(texts: Sequence[str]) -> list[int]:
    """Index into `KINDS` for each token.

    A word ends at white space and at punctuation. It is a number when it holds a digit, capitalised when it starts with an
    upper-case letter (at the start of a sentence too).
    """
    kinds = [KINDS.index("punctuation" if _is_punctuation(text) else "other") for text in texts]
    for word in _words(texts):
        spelled = "".join(texts[index].strip() for index in word)
        kind = "capitalised" if spelled[0].isupper() else "other"
        if any(map(str.isdigit, spelled)):
            kind = "number"
        for index in word:
            kinds[index] = KINDS.index(kind)
    return kinds


def _words(texts: Sequence[str]) -> Iterator[list[int]]:
    """The tokens of each word; those without letters and digits are in none."""
    word: list[int] = []
    for index, text in enumerate(texts):
        is_part = any(map(str.isalnum, text))
        if word and (text[:1].isspace() or _is_punctuation(text)):
            yield word
            word = []
        if is_part:
            word.append(index)
            if text[-1].isspace():
                yield word
                word = []
    if word:
        yield word


def _is_punctuation(text: str) -> bool:
    core = text.strip()
    return bool(core) and not any(map(str.isalnum, core))
