"""Text of many kinds out of a seed: prose and code of the standard library, facts, tables, numbers, other languages."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

NAMES = ("Maria", "Jonas", "Aylin", "Piotr", "Chen", "Olga", "Samuel", "Ines", "Tarek", "Yuki", "Nadia", "Victor")
PLACES = ("Lisbon", "the north tower", "room 12", "the old mill", "Hamburg", "the archive", "Kyoto", "dock four")
THINGS = ("spare key", "blue ledger", "ladder", "telescope", "generator", "first-aid kit", "projector", "red bicycle")
FACTS = (
    "The {thing} is kept in {place}; ask {name}.",
    "{name} moved to {place} in {year} and sold the {thing}.",
    "Since {year} the {thing} has been checked by {name} every {number} days.",
    "Nobody but {name} may open {place} after {number} o'clock.",
    "{name} paid {number} euros for the {thing}, which {other} had found in {place}.",
)
LANGUAGES = {
    "german": (
        "Der Schlüssel für {place} liegt seit {year} bei {name}.",
        "Am Ende des Jahres {year} wurden {number} Fahrräder gezählt, drei davon ohne Licht.",
        "{name} erinnerte sich nicht mehr daran, wer die Rechnung über {number} Euro bezahlt hatte.",
        "Die Straße ist gesperrt, weil die Brücke über den Fluss erneuert wird.",
        "Wer die Bücherei nach zwanzig Uhr betritt, muss sich bei {name} melden.",
    ),
    "russian": (
        "Ключ от мастерской с {year} года хранится у сторожа по имени {name}.",
        "Поезд из Казани опоздал на {number} минут, и встречать его никто не пришёл.",
        "В конце зимы река вышла из берегов и затопила нижнюю улицу.",
        "{name} купил дом у моря за {number} тысяч рублей и сразу покрасил его в синий цвет.",
        "Никто не помнил, кто последним закрывал библиотеку.",
    ),
    "chinese": (
        "仓库的钥匙从{year}年起由{name}保管。",
        "昨天的会议讨论了{number}个问题，其中三个没有结果。",
        "春天来了，河边的柳树已经发芽，孩子们在放风筝。",
        "如果晚上八点以后要进图书馆，请先给{name}打电话。",
        "这本书的价格是{number}元，比去年贵了一些。",
    ),
}
MODULES = (
    "textwrap",
    "json.decoder",
    "argparse",
    "difflib",
    "csv",
    "shutil",
    "statistics",
    "zipfile",
    "fractions",
    "heapq",
)
_SHORTEST_DOCSTRING = 60  # characters


class Tokenizer(Protocol):
    """What a HuggingFace tokenizer does here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Their text."""
        ...


def document(kind: str, tokens: int, rng: random.Random, tokenizer: Tokenizer) -> str:
    """A text of so many tokens, cut wherever they end."""
    pieces = _pieces(kind, rng)
    text = ""
    while len(ids := tokenizer.encode(text, add_special_tokens=False)) < tokens:
        text += next(pieces)
    return tokenizer.decode(ids[:tokens])


def filled(template: str, rng: random.Random) -> str:
    """A template with its blanks filled in."""
    name, other = rng.sample(NAMES, 2)
    words = {"thing": rng.choice(THINGS), "place": rng.choice(PLACES), "name": name, "other": other}
    return template.format(year=rng.randint(1890, 2024), number=rng.randint(2, 480), **words)


def _pieces(kind: str, rng: random.Random) -> Iterator[str]:
    """Endless pieces of text of one kind."""
    prose, code = _library_text()
    while True:
        if kind == "prose":
            yield rng.choice(prose) + "\n\n"
        elif kind == "code":
            yield rng.choice(code) + "\n\n"
        elif kind == "table":
            cells = (rng.choice(NAMES), rng.choice(THINGS), str(rng.randint(1900, 2024)), f"{rng.uniform(0, 900):.2f}")
            yield f"| {' | '.join(cells)} |\n"
        elif kind == "numbers":
            yield ", ".join(str(rng.choice((rng.randint(0, 9), rng.randint(10, 99999)))) for _ in range(8)) + "\n"
        else:
            yield filled(rng.choice(FACTS if kind == "facts" else LANGUAGES[kind]), rng) + " "


@cache
def _library_text() -> tuple[list[str], list[str]]:
    """Docstrings of the standard library, and its functions and classes as source."""
    prose: list[str] = []
    code: list[str] = []
    for module in MODULES:
        source = _source(module)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                code.append(_segment(source, node))
                if len(text := ast.get_docstring(node) or "") > _SHORTEST_DOCSTRING:
                    prose.append(text)
    return prose, code


def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _segment(source: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """The lines of a definition without its decorators, indented as in the file but for the first."""
    lines, end = source.splitlines(), node.end_lineno or node.lineno
    body = [*lines[node.lineno - 1 : end - 1], lines[end - 1][: node.end_col_offset]]
    return "\n".join(body)[node.col_offset :]
