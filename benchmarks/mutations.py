"""The faults that `benchmarks.mutants` puts into a module: one changed place each, found in its syntax tree."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}


@dataclass(frozen=True)
class Mutant:
    """A module with one change. `before` and `after` are the changed code, each as one line."""

    path: str
    line: int
    operator: str
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """The same for the same change of the same text: a run that goes on knows what it has tried."""
        return hashlib.sha256(f"{self.path}\n{self.source}".encode()).hexdigest()[:16]

    @property
    def change(self) -> str:
        return f"{self.before} -> {self.after}"


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Returns all mutants of a module, in the order of its lines. Mutants whose module does not change are left out."""
    lines = source.encode().splitlines(keepends=True)
    found: dict[str, Mutant] = {}
    for node, operator, new in _changes(ast.parse(source)):
        # A whole statement has no brackets around it; an expression keeps its place in the one that holds it.
        text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        changed = _replaced(lines, node, text)
        mutant = Mutant(path, node.lineno, operator, _short(node), _short(new), changed)
        if changed != source and _is_code(changed):
            found.setdefault(mutant.key, mutant)
    return sorted(found.values(), key=lambda mutant: (mutant.line, mutant.operator, mutant.after))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.expr | ast.stmt]]:
    """Yields (place, operator, what comes there)."""
    for node in _code(tree):
        if isinstance(node, ast.stmt):
            yield from ((node, operator, new) for operator, new in _statements(node))
        if isinstance(node, ast.expr):
            yield from ((node, operator, new) for operator, new in _expressions(node))
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, "negated condition", ast.UnaryOp(ast.Not(), node.test)
        if isinstance(node, ast.comprehension):
            yield from ((test, "negated condition", ast.UnaryOp(ast.Not(), test)) for test in node.ifs)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run: no annotations, decorators, parts of f-strings (they have no place) or imports. Defaults of a
    class's fields are left out too: a default is a choice, and `tests/unit/test_every_key.py` proves that settings are used."""
    yield node
    if isinstance(node, ast.ClassDef):
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        node = _with(node, body=[item for item in node.body if item not in fields])
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _statements(node: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    stores = isinstance(node, ast.Assign) and not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    if stores or (isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Assert) and not is_text):
        yield "removed statement", ast.Pass()
    if isinstance(node, ast.Return) and not _is_none(node.value):
        yield "returned value", ast.Return(ast.Constant(None))
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", _with(node, op=ARITHMETIC[type(node.op)]())
    if isinstance(node, ast.Break | ast.Continue):
        yield "break, continue", ast.Continue() if isinstance(node, ast.Break) else ast.Break()


def _expressions(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                yield "comparison", _with(node, ops=[*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]])
        case ast.BoolOp():
            yield "boolean", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "removed sign", node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC and not any(map(_is_text, (node.left, node.right))):
            yield "arithmetic", _with(node, op=ARITHMETIC[type(node.op)]())
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
        case ast.Call():
            for keyword in node.keywords:
                if keyword.arg:
                    yield "removed argument", _with(node, keywords=[other for other in node.keywords if other is not keyword])


def _with(node, **changes):
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    return new


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _replaced(lines: list[bytes], node: ast.expr | ast.stmt, text: str) -> str:
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    # As many lines as before: tracebacks and the list of survivors speak of the same lines.
    fill = b"\n" * (last - first)
    return b"".join([*lines[:first], head + text.encode() + tail + fill, *lines[last + 1 :]]).decode()


def _is_code(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
