"""What is used of JAX and of Ray without a public name is still there, and one file alone imports it."""

from __future__ import annotations

import ast
import operator
from pathlib import Path

import pytest

from cluster import ray_internals
from tests import PACKAGES, ROOT
from tests.imports import sources
from trainers import jax_internals

HOMES = {"jax._src": jax_internals, "ray._private": ray_internals}
NOT_CALLED = {"NAMES_IN_EXECUTABLES", "Node"}
"""What is taken whole: names alone, and a class whose methods are named by texts."""


@pytest.mark.parametrize(("home", "used"), [(home, used) for home in HOMES.values() for used in home.USED])
def test_it_is_still_there(home, used):
    assert operator.attrgetter(used)(home) is not None, home.USED[used]


@pytest.mark.parametrize("private", HOMES)
def test_no_other_file_imports_it(private):
    others = (path for package in PACKAGES for path in sources(package) if str(path) != HOMES[private].__file__)
    assert [path.relative_to(ROOT) for path in others if private in path.read_text()] == []


def test_one_file_imports_what_qwix_has_without_a_public_name():
    found = (
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in sources(package) if "qwix._" in path.read_text()
    )
    assert [*found] == ["trainers/models/layers.py"]


@pytest.mark.parametrize("home", HOMES.values())
def test_the_table_has_all_that_is_used(home):
    name = home.__name__.rpartition(".")[2]
    files = (path for package in PACKAGES for path in sources(package) if name in path.read_text())
    found = set().union(*(used_of(path, home.__name__) for path in files if str(path) != home.__file__))
    assert found - set(home.USED) <= NOT_CALLED


def used_of(path: Path, module: str) -> set[str]:
    """Of each name that a file takes from the module, the attributes that it uses; the name itself, if there are none."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == module)
    taken = {alias.name for node in imports for alias in node.names}
    attributes = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    used = {f"{node.value.id}.{node.attr}" for node in attributes if node.value.id in taken}
    return used | {name for name in taken if not any(text.startswith(f"{name}.") for text in used)}
