"""Writes `docs/files.md`: each file of the packages and the first sentence of its docstring, folder by folder.

    python -m tests.index

A test fails where the page is not what this writes.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests import ROOT

PACKAGES = ("gangway", "trainers", "cluster", "orchestrator")
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Every file

A line for each file, from its docstring; `make files` writes this page. [The architecture](architecture.md) shows how the parts
work together.
"""


def page() -> str:
    return "\n".join([HEAD, *(section(package) for package in PACKAGES)])


def section(package: str) -> str:
    rooms: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        rooms[path.parent.relative_to(ROOT)].append(path)
    return "\n".join(f"## `{room}/`\n\n{about(room)}{rows(room, paths)}" for room, paths in sorted(rooms.items()))


def about(room: Path) -> str:
    """Returns what the folder says of itself, as a paragraph."""
    init = ROOT / room / "__init__.py"
    said = summary(init) if init.exists() else ""
    return f"{said}\n\n" if said else ""


def rows(room: Path, paths: list[Path]) -> str:
    lines = [f"| `{room / path.name}` | {summary(path)} |" for path in paths if path.name != "__init__.py"]
    return "".join(f"{line}\n" for line in ["| file | what it is |", "|---|---|", *lines]) if lines else ""


def summary(path: Path) -> str:
    """Returns the first paragraph of a file's docstring as one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
