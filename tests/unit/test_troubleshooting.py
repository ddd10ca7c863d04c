"""Each line that docs/troubleshooting.md quotes is one that the program prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests import PACKAGES, ROOT
from tests.imports import sources

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^> (.*)$", TEXT, re.M)
LEAST_WORDS = 2
VALUE = "\0"
"""Stands for a value in a text of the program."""


def texts(node: ast.AST) -> Iterator[str]:
    """Every text in a source, with its values as VALUE. Texts that stand side by side are one."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
        elif isinstance(each, ast.JoinedStr):
            yield "".join(map(shown, each.values))


def shown(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return CONSTANTS.get(value.id, VALUE) if isinstance(value, ast.Name) else VALUE


TREES = [ast.parse(path.read_text()) for package in PACKAGES for path in sources(package)]
CONSTANTS = {
    node.targets[0].id: node.value.value
    for tree in TREES
    for node in tree.body
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
}
"""Texts that messages have in common, by their names."""
PRINTED = {text for tree in TREES for text in texts(tree)}


def is_printed(quoted: str, printed=PRINTED) -> bool:
    """Whether some text of the program has the words of this one, in their order, and values or other words at each `...`."""
    pieces = [re.escape(piece) for piece in re.split(r"\.\.\.", quoted)]
    pattern = re.compile(r"[\s\S]*".join(pieces))
    return any(pattern.search(text) for text in printed)


@pytest.mark.parametrize("line", QUOTED)
def test_a_quoted_line_is_printed_by_the_program(line):
    quoted = re.fullmatch(r"`([^`]+)`", line)
    assert quoted, "expected one line of code"
    assert len(re.findall(r"[a-z]{2,}", quoted[1])) >= LEAST_WORDS, "too short to be found"
    assert is_printed(quoted[1].strip(". ")), "the program prints no such line"


def test_a_line_that_is_not_printed_is_found_out():
    assert is_printed("run ... is in use: process ... on ...")
    assert not is_printed("run ... is in usage: process ... on ...")
    assert not is_printed("process ... on ... run ... is in use")


def test_each_quoted_line_is_followed_by_what_to_do():
    sections = re.split(r"^> .*\n(?:\n> .*\n)*", TEXT, flags=re.M)[1:]
    assert all(re.match(r"\n[A-Z`]", section) for section in sections)
    assert len(QUOTED) == len(set(QUOTED)) >= 30
