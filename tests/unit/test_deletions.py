"""Who deletes: read from the sources. One function of each package does, and it asks for a mark of ours."""

import ast
import re

import pytest

from tests import PACKAGES, ROOT
from tests.imports import sources

DELETES = {"gangway/storage/ours.py", "cluster/agent/log_mark.py"}
"""`cluster` imports nothing of `trainers`; it deletes logs alone."""
ASKED_BY_OURS = {f"gangway/storage/{name}.py" for name in ("object_store", "local_store")}
"""What a store does with its objects when `ours` has looked at the mark."""
NAMES = {"unlink", "rmtree", "rmdir", "removedirs", "rm", "rm_file", "_rm", "rm_r", "delete_run", "delete_experiment"}
"""Of `os`, `shutil`, `pathlib`, `fsspec` and MLflow."""
OF_MODULES = {"os": {"remove"}, "shutil": {"move"}}
"""What lists have, too."""
OF_STORES = {"delete", "delete_all"}


def deletions(text: str) -> list[int]:
    """Returns the lines of a source that delete something, by what they call, import or hand on."""
    found: list[int] = []
    if not re.search(r"\b(remove|move|rm|(?:(?:ob)?store|_client)\.delete\w*|" + "|".join(NAMES) + r")\b", text):
        return found  # most files: parsing all of them takes seconds
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in OF_MODULES.get(module, ()):
                found.append(node.lineno)
            case ast.Attribute(
                value=ast.Attribute(attr="store" | "_client") | ast.Name(id="store" | "obstore"), attr="delete" | "delete_all"
            ):
                found.append(node.lineno)
            case ast.Attribute(attr=name) if name in NAMES:
                found.append(node.lineno)
            case ast.ImportFrom(module=module, names=aliases):
                forbidden = NAMES | OF_MODULES.get(str(module), set())
                found += [node.lineno for alias in aliases if alias.name in forbidden]
            case ast.List(elts=[ast.Constant(value="rm" | "/bin/rm"), *_]):
                found.append(node.lineno)
    return sorted(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_one_function_deletes_and_it_asks_for_the_mark(package):
    others = (path for path in sources(package) if str(path.relative_to(ROOT)) not in DELETES | ASKED_BY_OURS)
    assert [f"{path.relative_to(ROOT)}:{line}" for path in others for line in deletions(path.read_text())] == []


def test_those_that_may_delete_are_there_and_do():
    assert all(deletions((ROOT / name).read_text()) for name in DELETES)


@pytest.mark.parametrize(
    "line",
    [
        "os.unlink(path)",
        "os.remove(path)",
        "path.unlink(missing_ok=True)",
        "shutil.rmtree(path)",
        "from shutil import rmtree",
        "from os import remove",
        "work(shutil.rmtree)",
        "filesystem.rm(path, recursive=True)",
        "subprocess.run(['rm', '-rf', path])",
        "client.delete_experiment('1')",
        "place.store.delete_all(name)",
        "store.delete(name)",
        "obstore.delete(client, name)",
        "self._client.delete(name)",
    ],
)
def test_the_reader_sees_what_deletes(line):
    assert deletions(line) == [1]


def test_the_reader_lets_pass_what_does_not():
    assert deletions("names.remove(1)\nours.delete(path, ours.TEMPORARY)\nos.replace(a, b)") == []
