"""What the code says of itself: the docstrings of classes and functions, and those below the fields of a class."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from functools import cache
from typing import Any

from tests.index import PACKAGES


def about(thing: Any) -> str:
    """Returns the docstring of a class or function as one line; nothing if it has none of its own."""
    text = thing.__doc__ or ""
    return "" if is_signature(text, thing) else one_line(text)


def is_signature(text: str, thing: Any) -> bool:
    """Whether a docstring is the signature that Python gives to a dataclass and a named tuple without one."""
    return text.startswith(f"{thing.__name__}(")


def one_line(text: str) -> str:
    return " ".join(text.split())


def paragraphs(thing: Any) -> str:
    """Returns the docstring of a class or function, its paragraphs as lines of their own; nothing if it has none of its own."""
    text = inspect.getdoc(thing) or ""
    if is_signature(text, thing):
        return ""
    return "\n\n".join(one_line(part) for part in text.split("\n\n"))


def of_fields(cls: type) -> dict[str, str]:
    """Returns what is written below the fields of a class, and of those it is made of, by name."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.partition(".")[0] in PACKAGES:
            found |= _of_own_fields(each)
    return found


@cache
def _of_own_fields(cls: type) -> dict[str, str]:
    tree = _tree(cls.__module__)
    (body,) = (node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    return {
        field.target.id: one_line(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))
