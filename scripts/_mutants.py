"""Mutants of a Python file: its text with one expression or statement replaced, as a programmer might have got it wrong.

Texts for people (docstrings, messages of errors, logging), types, assertions and Triton's kernels are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate

# The negation, and the neighbour that differs on equality alone.
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_LOGGERS = ("log", "logger", "logging", "warnings", "_log", "_logger")
_UNTOUCHED_DECORATORS = ("overload", "jit", "abstractmethod")


@dataclass(frozen=True)
class Mutant:
    """One replacement in a file.

    Args:
        path: Of the file.
        operator: The kind of mistake.
        line: Where the code that is replaced begins.
        end_line: Where it ends.
        start: Its place in the file's bytes.
        end: The end of that place.
        before: The code.
        after: What stands in its place.
        imported: It runs when the module is imported, not in a function.
    """

    path: str
    operator: str
    line: int
    end_line: int
    start: int
    end: int
    before: str
    after: str
    imported: bool

    @property
    def name(self) -> str:
        """What tells it from every other mutant of this source."""
        return f"{self.path}:{self.line}:{self.start}:{self.operator}:{self.after}"

    def applied(self, source: bytes) -> bytes:
        """The file's text with the replacement."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def record(self) -> dict[str, object]:
        """Its fields, for JSON."""
        return asdict(self)


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file, in the order of its text."""
    visitor = _Visitor(path, source)
    visitor.visit(ast.parse(source))
    return visitor.mutants


class _Visitor(ast.NodeVisitor):
    """Walks through a file and writes down its mutants."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self.mutants: list[Mutant] = []
        lengths = (len(line) for line in source.splitlines(keepends=True))
        self._starts = [0, *accumulate(lengths)]
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []

    def _propose(self, operator: str, node: ast.expr | ast.stmt, after: str) -> None:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[end_line - 1] + end_column
        before = self.source[start:end].decode()
        imported = not self._functions
        self.mutants.append(
            Mutant(self.path, operator, node.lineno, end_line, start, end, before, after, imported)
        )  # fmt: skip

    def _visit_each(self, nodes: list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    # What holds code

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Defaults and body; neither decorators nor annotations."""
        if any(name in ast.unparse(each) for each in node.decorator_list for name in _UNTOUCHED_DECORATORS):
            return
        for default in filter(None, [*node.args.defaults, *node.args.kw_defaults]):
            self.visit(default)
        self._functions.append(node)
        self._visit_each(node.body)
        self._functions.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """The same."""
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body."""
        self._visit_each(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Left alone."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Left alone: texts for people."""

    # Statements

    def visit_If(self, node: ast.If) -> None:
        """Taken always, and never."""
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            self._visit_each(node.orelse)
            return
        self._propose("always", node.test, "True")
        self._propose("never", node.test, "False")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Always the one value, and always the other."""
        self._propose("always", node.test, "True")
        self._propose("never", node.test, "False")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """The guard is gone; its message is left alone."""
        if not self._is_last(node):
            self._propose("no raise", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call for its effect is gone."""
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            if ast.unparse(call.func).split(".")[0] in _LOGGERS or ".log." in ast.unparse(call.func):
                return
            self._propose("no call", node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """None, the opposite, or on to what stands behind."""
        if not self._is_last(node):
            self._propose("no return", node, "pass")
        value = node.value
        if value is None or ast.unparse(value) == "None":
            return
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            self._propose("opposite", value, str(not value.value))
        elif isinstance(value, ast.BoolOp) or (
            isinstance(value, ast.Call) and ast.unparse(value.func) in ("any", "all")
        ):
            self._propose("opposite", value, f"(not ({ast.unparse(value)}))")
        self._propose("none", value, "None")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        """On to what stands behind."""
        self._propose("no continue", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        """On to the next item."""
        self._propose("no break", node, "pass")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Adds what it should take away, and the other way round."""
        if isinstance(node.op, ast.Add | ast.Sub):
            opposite: ast.operator = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            after = ast.AugAssign(target=node.target, op=opposite, value=node.value)
            self._propose("sum", node, ast.unparse(after))
        self.generic_visit(node)

    def _is_last(self, node: ast.stmt) -> bool:
        """Nothing of the function stands behind this statement: to leave it out is to return None."""
        if not self._functions:
            return False
        return node.lineno >= self._functions[-1].body[-1].lineno

    # Expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        """Each comparison negated, or with equality on the other side."""
        for place, operator in enumerate(node.ops):
            for other in _COMPARISONS[type(operator)]:
                operators = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                after = ast.Compare(left=node.left, ops=operators, comparators=node.comparators)
                self._propose("comparison", node, f"({ast.unparse(after)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`, and the other way round."""
        opposite: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._propose("logic", node, f"({ast.unparse(ast.BoolOp(op=opposite, values=node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without `not`."""
        if isinstance(node.op, ast.Not):
            self._propose("no not", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Plus for minus, and the other way round."""
        if isinstance(node.op, ast.Add | ast.Sub):
            opposite: ast.operator = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            after = ast.BinOp(left=node.left, op=opposite, right=node.right)
            self._propose("sum", node, f"({ast.unparse(after)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`min` for `max`, and the other way round."""
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._propose("extreme", node.func, "max" if node.func.id == "min" else "min")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A number one higher, and one lower."""
        for after in _neighbours(node.value):
            self._propose("number", node, f"({after!r})")


def _neighbours(value: object) -> Iterator[int | float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value + 1
        yield value - 1
