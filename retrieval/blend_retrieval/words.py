"""One form for texts that look the same, however they were typed: in the index and in the question alike.

Equal words have many spellings in Unicode: letters with their marks in one character or in two, wide letters, ligatures,
signs that nobody sees. `composed` makes them equal for embedders, `words` for the search by words. Both keep apart what
readers keep apart: "schön" is not "schon", and ten to the sixth is not "106". What a model reads as a passage stays as it is.

A change of `composed` changes vectors: raise `FORM`, so that indexes embed these texts anew.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple
from unicodedata import decimal, normalize

FORM = 2  # 1: texts were embedded as they were typed
_ASCII_WORD = re.compile(r"[a-z0-9_]+")
# Letters of scripts without blanks between words: each, with its marks, is a word. SA: Thai, Lao, Khmer, Burmese and others.
_ALONE = r"[\p{Han}\p{Hiragana}\p{Katakana}\u30fc\p{LB=SA}]"
_APOSTROPHES = r"[\u02b9-\u02bf\u02c8]"  # letters to Unicode, but also typed as apostrophes
_RAISED = "\u00b2\u00b3\u00b9\u2070\u2074-\u2079\u2080-\u2089"  # figures of powers, notes and formulas
# Malayalam and Bengali letters that older texts write with a joiner.
_WITH_JOINER = {
    "\u0d28\u0d4d\u200d": "\u0d7b",
    "\u0d23\u0d4d\u200d": "\u0d7a",
    "\u0d30\u0d4d\u200d": "\u0d7c",
    "\u0d32\u0d4d\u200d": "\u0d7d",
    "\u0d33\u0d4d\u200d": "\u0d7e",
    "\u0d15\u0d4d\u200d": "\u0d7f",
    "\u09a4\u09cd\u200d": "\u09ce",
}
# Letters that are typed one for the other. Arabic ones as in Lucene's normalizers for Arabic, Persian and Urdu.
_TYPED_AS = {
    **dict.fromkeys("\u0622\u0623\u0625\u0671", "\u0627"),  # alef
    **dict.fromkeys("\u0649\u06cc\u06d2", "\u064a"),  # yeh
    "\u06a9": "\u0643",  # kaf
    **dict.fromkeys("\u0629\u06c1\u06d5", "\u0647"),  # heh
    "\u0451": "\u0435",  # Russian yo
    "\u0131": "i",  # in capitals the Turkish dotless i is an I
    "\u0153": "oe",
}
_GREEK = (*range(0x0370, 0x0400), *range(0x1F00, 0x2000))


class _Patterns(NamedTuple):
    """What is replaced, in this order, and what a word is."""

    unseen: Any
    figures: Any
    signs: Any
    optional_marks: Any
    overlays: Any
    digits: Any
    word: Any


@lru_cache(maxsize=1)
def _patterns() -> _Patterns:
    import regex

    def pattern(text: str) -> Any:
        return regex.compile(text, regex.V1)

    return _Patterns(
        unseen=pattern(r"\xad\s*|[\p{Default_Ignorable_Code_Point}\u0640]+"),
        figures=pattern(rf"(?<=\d)(?=\p{{No}})|(?<=\p{{L}}{{4}})(?=[{_RAISED}])"),
        signs=pattern(rf"[[\p{{So}}\p{{No}}]--[{_RAISED}]]"),
        optional_marks=pattern(
            r"([\p{Hebrew}\p{Arabic}\p{Syriac}\p{Greek}])\p{Mn}+|(\p{Cyrillic})[\u0300\u0301]+|(i)\u0307"
        ),
        overlays=pattern(r"[\p{Me}\u0305\u0332\u0333\u0335-\u0338]"),
        digits=pattern(r"[\p{Nd}--[0-9]]"),
        word=pattern(
            rf"[{_ALONE}&&\p{{L}}]\p{{M}}*|"
            rf"[[\p{{L}}\p{{N}}_]--{_ALONE}--{_APOSTROPHES}][[\p{{L}}\p{{M}}\p{{N}}_]--{_ALONE}--{_APOSTROPHES}]*"
        ),
    )


@lru_cache(maxsize=1)
def _letters() -> dict[int, str]:
    """Greek letters lose their accents, which capitals do not have; others become what they are typed as."""
    bare = {point: normalize("NFD", chr(point))[0] for point in _GREEK}
    return bare | str.maketrans(_TYPED_AS)


def composed(text: str) -> str:
    """The text as an embedder reads it: in NFKC, without signs that nobody sees, and with powers and fractions apart."""
    if text.isascii():
        return text
    patterns = _patterns()
    for joined, letter in _WITH_JOINER.items():
        text = text.replace(joined, letter)
    text = patterns.unseen.sub("", text)
    return normalize("NFKC", patterns.figures.sub(" ", text))


def folded(text: str) -> str:
    """The text in the form in which words are compared.

    As `composed`, and with folded case; digits of all scripts are 0 to 9. Marks that writers leave out are dropped: Arabic
    vowels, Hebrew points, Greek accents, Russian stress.
    """
    if text.isascii():
        return text.casefold()
    patterns = _patterns()
    signs_apart = patterns.signs.sub(r" \g<0> ", text)  # NFKC makes letters of some, such as the trademark sign
    text = composed(signs_apart).casefold().translate(_letters())
    text = patterns.optional_marks.sub(r"\1\2\3", text)
    text = patterns.overlays.sub("", text)
    return str(patterns.digits.sub(lambda digit: str(decimal(digit[0])), text))


def words(text: str) -> list[str]:
    """The words of a text in the form in which they are compared."""
    plain = folded(text)
    if plain.isascii():
        return _ASCII_WORD.findall(plain)
    divided: list[str] = _patterns().word.findall(plain)
    return divided
