"""Writes the pages that are made from the code: `make files`.

    python -m tests.pages

A test fails where a page is not what this writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests import ROOT
from tests.pages import api, commands, keys

PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "keys.md": keys.page,
    ROOT / "docs" / "commands.md": commands.page,
    ROOT / "docs" / "api.md": api.page,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
