"""What files import: read from the sources, so that nothing has to be imported to know."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests import ROOT


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def imports(path: Path, *, only_at_import: bool = False) -> tuple[tuple[str, int], ...]:
    """(module, line) of every import in a file; of those that run when the file is imported, if asked."""
    tree = ast.parse(path.read_text())
    return tuple(imported_by(_run_at_import(tree) if only_at_import else ast.walk(tree), path))


def imports_for_types(path: Path) -> set[tuple[str, int]]:
    """(module, line) of the imports that only a type checker does."""
    blocks = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.If) and _is_for_types(node)]
    return {found for block in blocks for found in imported_by(ast.walk(block), path)}


def _is_for_types(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_by(nodes: Iterable[ast.AST], path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import among the nodes of a file."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((name if file_of(name) else str(node.module), node.lineno) for name in names)


@functools.cache
def file_of(module: str) -> Path | None:
    """Of a module of ours."""
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and _is_for_types(child):
            continue
        yield child
        yield from _run_at_import(child)


def top(module: str) -> str:
    return module.partition(".")[0]
