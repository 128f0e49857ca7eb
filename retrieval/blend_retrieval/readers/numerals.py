"""Numbers as lists show them: letters, Roman numerals, words, digits of other scripts."""

from __future__ import annotations

import re

_ROMAN = (
    (1000, "m"),
    (900, "cm"),
    (500, "d"),
    (400, "cd"),
    (100, "c"),
    (90, "xc"),
    (50, "l"),
    (40, "xl"),
    (10, "x"),
    (9, "ix"),
    (5, "v"),
    (4, "iv"),
    (1, "i"),
)
_MOST_ROMAN = 4999
_MOST_CIRCLED = 20
_LATIN = "abcdefghijklmnopqrstuvwxyz"
_ALPHABETS = {
    "russianLower": "абвгдежзиклмнопрстуфхцчшщыэюя",
    "russianUpper": "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЩЫЭЮЯ",
    "hebrew2": "אבגדהוזחטיכלמנסעפצקרשת",
    "arabicAlpha": "أبتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "arabicAbjad": "أبجدهوزحطيكلمنسعفصقرشتثخذضظغ",
    "ganada": "가나다라마바사아자차카타파하",
    "chosung": "ㄱㄴㄷㄹㅁㅂㅅㅇㅈㅊㅋㅌㅍㅎ",
    "aiueoFullWidth": "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワヲン",
    "irohaFullWidth": "イロハニホヘトチリヌルヲワカヨタレソツネナラムウヰノオクヤマケフコエテアサキユメミシヱヒモセスン",
    "ideographTraditional": "甲乙丙丁戊己庚辛壬癸",
    "ideographZodiac": "子丑寅卯辰巳午未申酉戌亥",
}
_DIGITS = {
    "decimalFullWidth": "０１２３４５６７８９",
    "decimalFullWidth2": "０１２３４５６７８９",
    "hindiNumbers": "०१२३४५६७८९",
    "thaiNumbers": "๐๑๒๓๔๕๖๗๘๙",
    "ideographDigital": "〇一二三四五六七八九",
    "japaneseDigitalTenThousand": "〇一二三四五六七八九",
    "taiwaneseDigital": "〇一二三四五六七八九",
    "koreanDigital": "영일이삼사오육칠팔구",
}
_EAST_ASIAN = (
    "chineseCounting",
    "chineseCountingThousand",
    "japaneseCounting",
    "taiwaneseCounting",
    "taiwaneseCountingThousand",
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ONES = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_PADDED = re.compile(r"(0*)1\b")


def numeral(number: int, kind: str) -> str | None:
    """A number in one of Word's formats, such as "lowerRoman", or in that of a sample, such as "01"; None if it is unknown."""
    if kind in ("decimal", ""):
        return str(number)
    if kind in ("none", "bullet"):
        return ""
    padded = _PADDED.match(kind)
    if padded:
        return str(number).zfill(len(padded[0]))
    if kind == "decimalZero":
        return f"{number:02}"
    if kind in ("lowerRoman", "upperRoman"):
        return _cased(_roman(number), kind)
    if kind in ("lowerLetter", "upperLetter"):
        return _cased(_repeated(number, _LATIN), kind)
    if kind in _ALPHABETS:
        return _repeated(number, _ALPHABETS[kind])
    if kind in _DIGITS:
        signs = [_DIGITS[kind][int(digit)] for digit in str(number)]
        return "".join(signs)
    if kind in _EAST_ASIAN:
        return _east_asian(number)
    return _decorated(number, kind)


def _decorated(number: int, kind: str) -> str | None:
    if kind.startswith("decimalEnclosedCircle") and 0 < number <= _MOST_CIRCLED:
        return chr(ord("①") + number - 1)
    sign = "*†‡§"[(number - 1) % 4]
    forms = {
        "ordinal": f"{number}{ordinal_ending(number)}",
        "cardinalText": words(number).capitalize(),
        "ordinalText": _ordinal_words(number).capitalize(),
        "numberInDash": f"- {number} -",
        "hex": f"{number:X}",
        "decimalHalfWidth": str(number),
        "decimalEnclosedParen": f"({number})",
        "decimalEnclosedFullstop": f"{number}.",
        "chicago": sign * ((number - 1) // 4 + 1),
    }
    return forms.get(kind)


def _cased(text: str, kind: str) -> str:
    return text.upper() if kind.startswith("upper") else text


def _roman(number: int) -> str:
    if not 0 < number <= _MOST_ROMAN:
        return str(number)
    signs = []
    for size, sign in _ROMAN:
        signs.append(sign * (number // size))
        number %= size
    return "".join(signs)


def _repeated(number: int, alphabet: str) -> str:
    """Word's letters: a to z, then aa, bb, cc."""
    if number < 1:
        return str(number)
    rounds, place = divmod(number - 1, len(alphabet))
    return alphabet[place] * (rounds + 1)


def _east_asian(number: int) -> str | None:
    digits = "〇一二三四五六七八九"
    if not 0 <= number < 100:
        return None
    tens, ones = divmod(number, 10)
    if not tens:
        return digits[ones]
    before = "" if tens == 1 else digits[tens]
    behind = digits[ones] if ones else ""
    return f"{before}十{behind}"


def ordinal_ending(number: int) -> str:
    """Such as "st" for 1 and 21."""
    if 10 <= number % 100 <= 20:
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def words(number: int) -> str:
    """A number below 1,000 in English words; larger ones in digits."""
    if not 0 <= number < 1000:
        return str(number)
    if number < len(_ONES):
        return _ONES[number]
    hundreds, below = divmod(number, 100)
    if hundreds:
        return f"{_ONES[hundreds]} hundred" + (f" {words(below)}" if below else "")
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


def _ordinal_words(number: int) -> str:
    cardinal = words(number)
    stem, last = re.fullmatch(r"(.*?)([a-z0-9]+)", cardinal).groups()  # type: ignore[union-attr]
    if last.isdigit():
        return f"{cardinal}{ordinal_ending(number)}"
    if last.endswith("y"):
        return f"{stem}{last[:-1]}ieth"
    ending = "twelfth" if last == "twelve" else f"{last}th"
    return stem + _ORDINALS.get(last, ending)
