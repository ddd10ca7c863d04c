"""What a change can reach: the files of tests that read one of the files that have changed, and the whole jobs that are about it.

`python -m tests.reach [FILE ...]` prints them for these files, or for what has changed since the commit that
`tests/proved.toml` names: the last one at which all tests were run. Files that failed there are run with every change until all
pass. Of the files that a change cannot reach, a fifth is run with it, in turns.

Why not pytest-testmon, which records the lines that each test executes: most of the cost of the slow tests lies in processes that
they start, which it does not see, and a clean clone has no record."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterable
from pathlib import Path

from tests import PACKAGES, ROOT
from tests.imports import imported_by

PROVED = ROOT / "tests" / "proved.toml"
CODE = (*PACKAGES, "tests", "benchmarks", "examples")
TURNS = 5
EVERYTHING = ("requirements.lock", "pyproject.toml", "setup.py", "Makefile", "tests/conftest.py", "tests/__init__.py")
"""What every test stands on."""
NOTHING = (
    *(".gitignore", ".pre-commit-config.yaml", "LICENSE", ".ci/run", "tests/proved.toml", "tests/costs.json"),
    *(f"tests/{name}.py" for name in ("reach", "costs", "ceilings", "progress", "run")),
)
"""What no slow test stands on: `make lint` and `make test` read them. Some say which tests are run, and what they cost."""
SAY_NOTHING = ("tests", "unit", "data", "programs")
"""Folders that too many programs name."""
STARTED_BY_NAME = {"orchestrator/driver/main.py": ("trainers/worker.py",), "orchestrator/run.py": ("trainers/worker.py",)}
"""Programs that the product starts and does not import."""


def main(changed: list[str]) -> None:
    for file in chosen(changed or changed_files()):
        print(file)


def chosen(changed: Iterable[str] | None, turn: int | None = None) -> list[str]:
    """Returns the files of tests whose slow tests are run for a change. `None` is a change that nobody knows: all of them."""
    files = test_files()
    if changed is None:
        return files
    changed = list(changed)
    turn = number_of_commits() % TURNS if turn is None else turn
    return [file for file in files if reaches(file, changed) or file in unproved() or turn_of(file) == turn]


def turn_of(file: str) -> int:
    """Returns at which commit, modulo TURNS, a file is run whatever has changed."""
    return zlib.crc32(file.encode()) % TURNS


def documents_alone(changed: Iterable[str] | None) -> bool:
    """Says whether a change is one of documents, which only the tests of documents read."""
    return bool(changed) and all(is_document(file) for file in changed or ())


def is_document(file: str) -> bool:
    return file.endswith(".md") or (file.startswith("docs/") and not file.endswith(".py"))


def test_files() -> list[str]:
    return sorted(name(path) for path in (ROOT / "tests").rglob("test_*.py"))


def reaches(test: str, changed: Iterable[str]) -> bool:
    """Says whether one of the changed files can change what a file of tests sees."""
    return any(_reaches(test, file) for file in changed)


@functools.cache
def _reaches(test: str, file: str) -> bool:
    if file in NOTHING:
        return False
    if file in EVERYTHING:
        return True
    read, wings = closure(test), wings_of(test)
    if wings and file.startswith(PACKAGES):
        return any(file == wing or file.startswith(f"{wing}/") for wing in wings)
    if file.endswith(".py"):
        # A deleted file was imported by what has changed with it. One that nobody imports is a program, named somewhere.
        return file in read or (not is_code(file) and names(read, file))
    return names(read, file)


def is_code(file: str) -> bool:
    return file.partition("/")[0] in CODE


def names(read: frozenset[str], file: str) -> bool:
    """Says whether a program names a file that is not imported: by its name, or by that of its folder."""
    path = Path(file)
    if path.parts[0] == "tests":
        # The packages of tests/weed.txt are in build/weed.
        words = [path.name, f'"{path.stem}"', *(folder for folder in path.parent.parts if folder not in SAY_NOTHING)]
    else:
        words = [path.name, *(f"{parent}" for parent in path.parents if str(parent) != ".")]
    return any(word in text_of(reader) for reader in read if reader.startswith("tests/") for word in words)


@functools.cache
def wings_of(test: str) -> tuple[str, ...]:
    """Returns the parts of the product that a file of whole jobs is about: its `WINGS`. A job runs nearly all of the product, but
    what else it runs has tests of its own."""
    for node in ast.parse(text_of(test)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "WINGS":
            return tuple(ast.literal_eval(node.value))
    return ()


@functools.cache
def closure(test: str) -> frozenset[str]:
    """Returns the files of ours that a file of tests reads, those of its folders' conftest.py too."""
    conftests = [name(path) for parent in (ROOT / test).parents for path in [parent / "conftest.py"] if path.exists()]
    found, waiting = set[str](), [test, *conftests]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += arrows(file)
    return frozenset(found)


@functools.cache
def arrows(file: str) -> tuple[str, ...]:
    """Returns the files that a file imports, anywhere in it; of tests and examples, those that a text of theirs names too."""
    found = set[str]()
    nodes = [*ast.walk(ast.parse(text_of(file)))]
    modules = [module for module, _ in imported_by(nodes, ROOT / file)]
    if not file.startswith(PACKAGES) and Path(file).parent != Path("tests"):  # which holds what runs the tests
        texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        modules += [text.partition(":")[0] for text in texts]
    found.update(path for module in modules for path in files_of(module))
    return (*sorted(found - {file}), *STARTED_BY_NAME.get(file, ()))


@functools.cache
def files_of(module: str) -> tuple[str, ...]:
    """Returns the file of a module, or of the longest part of a dotted name that is one, with the packages around it."""
    parts = module.split(".") if len(module) < 200 else [""]
    if parts[0] not in CODE or not all(part.isidentifier() for part in parts):
        return ()
    around = [ROOT.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
    modules = [ROOT.joinpath(*parts[:depth]).with_suffix(".py") for depth in (len(parts) - 1, len(parts)) if depth]
    return tuple(name(path) for path in (*around, *modules) if path.exists())


@functools.cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text()


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def proved() -> str | None:
    """Returns the last commit at which all tests were run."""
    return tomllib.loads(PROVED.read_text()).get("commit") if PROVED.exists() else None


def unproved() -> list[str]:
    """Returns the files of tests that failed there."""
    return tomllib.loads(PROVED.read_text()).get("failed", []) if PROVED.exists() else []


def changed_files() -> list[str] | None:
    """Returns what has changed since the proved commit, in the working tree too. None: nobody knows."""
    commit = proved()
    if not commit:
        return None
    ran = git("diff", "--name-only", "--no-renames", commit, "--")
    new = git("ls-files", "--others", "--exclude-standard")
    if ran is None or new is None:
        return None
    return sorted({*ran.splitlines(), *new.splitlines()})


def prove(failed: Iterable[str]) -> str:
    """Writes that all tests have passed at the present commit, but for these files. Returns a sentence about it."""
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    if not commit or changes:
        return "tests/proved.toml stays as it is: the tree that was tested is no commit"
    files = "".join(f'    "{file}",\n' for file in sorted(failed))
    PROVED.write_text(
        "# The last commit at which `make test-all` ran to its end. What failed there is run with every change until all pass.\n"
        f'commit = "{commit.strip()}"\nfailed = [\n{files}]\n'
    )
    return f"tests/proved.toml names {commit[:12]} now{', and what failed' if files else ''}: commit it"


def number_of_commits() -> int:
    return int(git("rev-list", "--count", "--first-parent", "HEAD") or 0)


def git(*arguments: str) -> str | None:
    """Returns what git prints; None where it fails, or there is none."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
