"""Builds the site of the documents into build/site, with warnings as errors: `make site`.

    python -m tests.site [FOLDER]

The pages are those of `docs`, with CONTRIBUTING and CHANGELOG. The tool is in an environment of its own (tests/site.txt), so that
it changes nothing of the environment of the project.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT

DOCS = ROOT / "docs"
TOOL = ROOT / "build" / "zensical"
"""Where `make build/zensical` puts the tool."""
BESIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Documents beside `docs` that are pages too, by their names there."""
OPTION = re.compile(r"(\s)(--[a-z-]+)")
"""An option in code that is more than the option."""


class SiteError(Exception):
    """The site could not be built without a warning; the message is what the tool has printed."""


def lay(folder: Path) -> Path:
    """Lays the pages, and what describes the site, into a folder, and returns the description. Links to documents beside `docs`
    become links to their pages."""
    pages = folder / "pages"
    pages.mkdir(parents=True)
    for path in (*DOCS.glob("*.md"), *(ROOT / name for name in BESIDE)):
        (pages / BESIDE.get(path.name, path.name)).write_text(linked(path))
    for name in ("images", "grafana"):
        shutil.copytree(DOCS / name, pages / name)
    shutil.copy(DOCS / "site" / "site.css", pages)
    return Path(shutil.copy(DOCS / "site" / "zensical.toml", folder))


def linked(path: Path) -> str:
    """Returns the text of a document, with its links as they are from page to page."""
    text = path.read_text()
    for name, page in BESIDE.items():
        text = text.replace(f"](../{name}", f"]({page}").replace(f"]({name}", f"]({page}")
    return text if path.parent == DOCS else re.sub(r"\]\(docs/", "](", text)


def build(folder: Path) -> Path:
    """Builds the site in a new folder, and returns the folder of its pages. Raises SiteError for any warning."""
    description = lay(folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(description)]
    surroundings = {**os.environ, "PYTHONPATH": str(TOOL), "NO_COLOR": "1"}
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=surroundings)
    if done.returncode:
        raise SiteError(done.stdout)
    for page in (folder / "site").glob("*.html"):
        page.write_text(whole_names(page.read_text()))
    return folder / "site"


def whole_names(page: str) -> str:
    """Returns a page whose short names in code, and whose options in longer code, are each on one line. Without this a browser
    breaks them after a hyphen, as in `--` and `adapter`, and in a narrow column of a table at any letter."""
    page = re.sub(r"<code>([^\s<]{1,32})</code>", r'<code class="whole">\1</code>', page)
    return re.sub(r"<code>[^<]* --[^<]*</code>", lambda code: OPTION.sub(r'\1<span class="whole">\2</span>', code[0]), page)


def main(folder: Path) -> int:
    shutil.rmtree(work := folder.with_name(f"{folder.name}.tmp"), ignore_errors=True)
    try:
        built = build(work)
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(built, folder)
    shutil.rmtree(work)
    print(f"The site is {folder / 'index.html'}; for its search, serve it: python -m http.server --directory {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "site"))
