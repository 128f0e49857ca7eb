"""The text of each token of a prompt, and what kind of word it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = ("capitalised", "number", "punctuation", "other")
_UNFINISHED = "\ufffd"
# A character takes at most four bytes, and byte-level tokens hold at least one each.
_LONGEST_CHARACTER = 4


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """What each token adds to the text; a character split over several tokens stands at the first of them."""
    texts: list[str] = []
    start = 0
    while start < len(ids):
        stop = start + 1
        text = _decode(tokenizer, ids[start:stop])
        while _UNFINISHED in text and stop < min(len(ids), start + _LONGEST_CHARACTER):
            stop += 1
            longer = _decode(tokenizer, ids[start:stop])
            if _UNFINISHED not in longer:
                text = longer
                break
        else:
            stop = start + 1
        texts += [text, *[""] * (stop - start - 1)]
        start = stop
    return tuple(texts)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    # SentencePiece vocabularies mark a leading space that decoding drops at the start of a text.
    piece = str(tokenizer.convert_ids_to_tokens(int(ids[0])))
    return f" {text}" if piece.startswith("\u2581") and not text.startswith(" ") else text


def word_kinds(texts: Sequence[str]) -> tuple[int, ...]:
    """Index into `KINDS` for each token, by the word that it is part of: a cheap proxy for named entities.

    A word ends at white space and at punctuation. It is a number when it holds a digit, capitalised when it starts with an
    upper-case letter (at the start of a sentence too).
    """
    kinds: list[int] = []
    word: list[int] = []
    spelled = ""
    for index, text in enumerate(texts):
        core = text.strip()
        kinds.append(KINDS.index("punctuation" if core and not any(map(str.isalnum, core)) else "other"))
        if text[:1].isspace() or kinds[-1] == KINDS.index("punctuation"):
            _label(kinds, word, spelled)
            word, spelled = [], ""
        if core and kinds[-1] != KINDS.index("punctuation"):
            word.append(index)
            spelled += core
            if text[-1:].isspace():
                _label(kinds, word, spelled)
                word, spelled = [], ""
    _label(kinds, word, spelled)
    return tuple(kinds)


def _label(kinds: list[int], word: Sequence[int], spelled: str) -> None:
    plain = "capitalised" if spelled[:1].isupper() else "other"
    kind = "number" if any(map(str.isdigit, spelled)) else plain
    for index in word:
        kinds[index] = KINDS.index(kind)
