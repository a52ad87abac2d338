"""Faults drawn at random: one place of one module changed, as a slip of the pen would.

An estimate for mistakes that nobody has thought of. Some change nothing that anybody could see: no test can find them.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .faults import PACKAGE, Fault

PACKAGES = ("runtime", "comm", "optim", "schedules", "planning")
"""Folders of the package that as many faults each are drawn from."""

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*")}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SAID = ("logger", "warn", "print")
"""In the names of functions that only tell people something."""


class Change(NamedTuple):
    """Bytes ``start`` to ``stop`` of a file's text become ``new``."""

    line: int
    start: int
    stop: int
    new: str


def random_faults(repository: Path, count: int, seed: int) -> list[Fault]:
    """Draw faults, as many of each of :data:`PACKAGES`; the same for a seed, as long as the code is."""
    draw, faults = random.Random(seed), list[Fault]()
    for number, package in enumerate(PACKAGES):
        files = sorted((repository / PACKAGE / package).glob("*.py"))
        places = [(file, change) for file in files for change in changes(file.read_bytes())]
        wanted = count // len(PACKAGES) + (number < count % len(PACKAGES))
        drawn = draw.sample(places, wanted)
        faults += [_fault(f"{package}/{file.name}", file.read_bytes(), change) for file, change in drawn]
    return faults


def changes(text: bytes) -> list[Change]:
    """All that may be changed in a module, in the order of its lines; nothing in messages, annotations and imports."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        start, stop = place(left)[1], place(right)[0]
        if (found := text[start:stop].find(old.encode())) >= 0:
            yield Change(left.lineno, start + found, start + found + len(old), new)

    def of(node: ast.AST) -> Iterator[Change]:
        match node:
            case ast.If(test=test):
                start, stop = place(test)
                yield Change(test.lineno, start, stop, f"not ({text[start:stop].decode()})")
            case ast.Expr(value=ast.Call()):
                yield Change(node.lineno, *place(node), "pass")
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
                yield from between(left, right, *COMPARISONS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
                yield from between(left, right, *ARITHMETIC[type(operator)])
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, *(("and", "or") if isinstance(operator, ast.And) else ("or", "and")))
            case ast.Constant(value=bool(value)):
                yield Change(node.lineno, *place(node), str(not value))
            case ast.Constant(value=int(value)):
                yield Change(node.lineno, *place(node), str(value + 1))
            case ast.Call(func=ast.Name(id=name) as called) if name in FUNCTIONS:
                yield Change(node.lineno, *place(called), FUNCTIONS[name])

    tree = ast.parse(text)
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [change for top in tree.body if isinstance(top, kinds) for node in _acting(top) for change in of(node)]


def _acting(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those in it, without what only tells people or the type checker something."""
    yield node
    for part in _parts(node):
        if isinstance(part, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert, ast.arguments)):
            continue
        if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING":
            continue
        call = part.value if isinstance(part, ast.Expr) else part
        if isinstance(call, ast.Call) and any(said in ast.unparse(call.func) for said in SAID):
            continue
        yield from _acting(part)


def _parts(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.FunctionDef():
            return node.body
        case ast.AnnAssign():
            return () if node.value is None else (node.value,)
        case ast.ClassDef():
            return node.body
    return ast.iter_child_nodes(node)


def _fault(file: str, text: bytes, change: Change) -> Fault:
    """The change with as many lines around it as make it the only one of its kind."""
    start, stop = change.start, change.stop
    while text.count(text[start:stop]) > 1 or start == stop:
        start = text.rfind(b"\n", 0, max(start - 1, 0)) + 1
        end = text.find(b"\n", stop + 1)
        stop = len(text) if end < 0 else end
    new = text[start : change.start] + change.new.encode() + text[change.stop : stop]
    old = text[change.start : change.stop].decode()
    return Fault(
        f"{file}:{change.line} {old[:40]!r} becomes {change.new[:40]!r}",
        file,
        text[start:stop].decode(),
        new.decode(),
        "drawn at random",
    )
