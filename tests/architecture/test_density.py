"""How dense the source is to read: it may become easier, not harder."""

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest
from places import REPOSITORY

# Names that do not say what a thing is.
PRONOUNS = (
    "found held given made one mine own known seen asked more others other both "
    "done left kept wanted said some gone rest theirs"
)
LONGEST_FUNCTION = 60  # lines; a kernel is one function
WORST = 5  # files named in a failure


class Limits(NamedTuple):
    """Most tokens a line of code, and share of assigned names that are pronouns."""

    per_line: float
    pronouns: float


FOLDERS = {
    "blend": Limits(per_line=9.5, pronouns=0.002),
    "kernels": Limits(per_line=9.3, pronouns=0.001),
    "retrieval": Limits(per_line=8.8, pronouns=0.003),
}


class Source(NamedTuple):
    """Tokens of each line of code, assigned names, and the length of each function by its name."""

    tokens: list[int]
    names: list[str]
    functions: dict[str, int]

    @property
    def per_line(self) -> float:
        return sum(self.tokens) / max(1, len(self.tokens))

    @property
    def pronouns(self) -> float:
        pronouns = PRONOUNS.split()
        return sum(name in pronouns for name in self.names) / max(1, len(self.names))


@cache
def sources(folder: str) -> dict[str, Source]:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    return {str(file.relative_to(REPOSITORY)): measure(file.read_text(encoding="utf-8")) for file in files}


def measure(text: str) -> Source:
    nodes = list(ast.walk(ast.parse(text)))
    functions = {
        f"{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return Source(tokens_of_lines(text, docstring_lines(nodes), import_lines(nodes)), names, functions)


def docstring_lines(nodes: list[ast.AST]) -> set[int]:
    """Where docstrings begin."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    first = [node.body[0] for node in nodes if isinstance(node, documented) and node.body]
    return {node.lineno for node in first if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def import_lines(nodes: list[ast.AST]) -> set[int]:
    """Where modules are imported."""
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return {line for node in imports for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def tokens_of_lines(text: str, docstrings: set[int], imports: set[int]) -> list[int]:
    """Tokens of each line. The path of an import, such as `a.b.c`, is one: folders make no line harder to read."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type in kinds]
    lines = Counter(
        token.start[0] for token in tokens if token.type != tokenize.STRING or token.start[0] not in docstrings
    )
    for token in tokens:
        if token.string == "." and token.start[0] in imports:
            lines[token.start[0]] -= 2
    return list(lines.values())


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_source_does_not_grow_denser(folder):
    files, limits = sources(folder), FOLDERS[folder]
    tokens = [count for source in files.values() for count in source.tokens]
    whole = Source(tokens, [name for source in files.values() for name in source.names], {})
    worst = sorted(files, key=lambda path: files[path].per_line + 50 * files[path].pronouns, reverse=True)[:WORST]
    assert whole.per_line <= limits.per_line, worst
    assert whole.pronouns <= limits.pronouns, worst


def test_no_function_is_too_long():
    lengths = {
        f"{path}:{name}": length
        for folder in ("blend", "retrieval")
        for path, source in sources(folder).items()
        for name, length in source.functions.items()
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_measuring_counts_code_and_not_words_about_it():
    source = measure(
        '"""Some words."""\nimport a.b.c\n\n\ndef f(x):\n    """More."""\n    one = x + 1\n    return one\n'
    )
    assert source == Source([2, 6, 5, 2], ["one"], {"f:5": 4})
    assert (source.per_line, source.pronouns) == (15 / 4, 1.0)
