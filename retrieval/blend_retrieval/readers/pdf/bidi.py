"""Lines from right to left: the order in which they are read, from the places of their characters on the page.

This reverses the reordering for display of the Unicode Bidirectional Algorithm, for a paragraph from right to left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import bidirectional, combining

_TYPES = {"R": "R", "AL": "R", "L": "L", "EN": "D", "AN": "A", "ES": "S", "CS": "C", "ET": "T"}
_OTHER = "N"
_NUMBER = "T*D+(?:[SC]D+)*T*"
_LEFT_TO_RIGHT = re.compile(rf"(?:{_NUMBER})?L(?:[LDTSCN]*(?:L|DT*))?|{_NUMBER}|A+(?:CA+)*")
_RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]")
_CLOSING = dict(zip(")]}»›", "([{«‹", strict=True))
_OPENING = {opening: closing for closing, opening in _CLOSING.items()}


def has_right_to_left(text: str) -> bool:
    """Whether a letter is of a script from right to left."""
    return _RIGHT_TO_LEFT.search(text) is not None


def is_right_to_left(text: str) -> bool:
    """Whether more than half of the letters are of scripts from right to left."""
    letters = sum(map(str.isalpha, text))
    return 2 * len(_RIGHT_TO_LEFT.findall(text)) > letters


def reading_order(signs: Sequence[str]) -> list[int]:
    """The places of a line's signs in the order in which they are read. signs: from left to right."""
    types = "".join(map(_type, signs))
    order: list[int] = []
    stop = len(signs)
    runs = list(_LEFT_TO_RIGHT.finditer(types))
    for run in reversed(runs):
        order += reversed(range(run.end(), stop))
        order += range(run.start(), run.end())
        stop = run.start()
    order += reversed(range(stop))
    return order


def _type(sign: str) -> str:
    """The type of a sign by its first character: R, L, a digit, a separator or another."""
    kind = bidirectional(sign[0]) if sign else ""
    return _TYPES.get(kind, _OTHER)


def with_brackets(signs: Sequence[str]) -> list[str]:
    """The signs of a line in reading order; brackets that close before they open are turned."""
    waiting: list[int] = []
    unmatched: list[int] = []
    for place, sign in enumerate(signs):
        bracket = sign.strip()
        if bracket in _OPENING:
            waiting.append(place)
        elif bracket in _CLOSING:
            opening = signs[waiting[-1]].strip() if waiting else ""
            if opening == _CLOSING[bracket]:
                waiting.pop()
            else:
                unmatched.append(place)
    turned = list(signs)
    if unmatched and waiting:
        for place in [*unmatched, *waiting]:
            sign = signs[place].strip()
            opposite = _CLOSING.get(sign) or _OPENING[sign]
            turned[place] = signs[place].replace(sign, opposite)
    return turned


def is_mark(sign: str) -> bool:
    """Whether a sign stands over, under or in a letter, such as a vowel of Hebrew or Arabic."""
    return bool(sign) and combining(sign[0]) > 0
