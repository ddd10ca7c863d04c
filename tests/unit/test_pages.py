"""Every key, command, metric and public name is in a page of the documents, which is as the code says."""

import ast
import re

import pytest

from gangway import published
from orchestrator.gangway import COMMANDS
from tests import ROOT
from tests.pages import api, keys
from tests.pages.__main__ import PAGES
from tests.unit.config_keys import every_key
from tests.unit.documents import DOCUMENTS, FENCE, blocks

OURS = ("gangway", "trainers", "cluster", "orchestrator")
COPIED_WORDS = 30
"""As many words in a row, in two pages, are a copy."""
KEYS, METRICS, PYTHON = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("keys", "metrics", "api"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_what_the_code_says(path):
    assert path.read_text() == PAGES[path](), "make files"


@pytest.mark.parametrize("name", every_key())
def test_a_key_says_what_it_means_and_is_in_the_page(name):
    assert keys.meaning_of(every_key()[name]), f"{name}: nothing below its field says what it means"
    assert f"\n- **`{name}`** · " in KEYS


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("seed", "- **`seed`** · whole number, at least 0 · default `0`"),
        ("optimizer.betas", "list of 2 numbers · default `[0.9, 0.95]`"),
        ("optimizer.groups.pattern", "text, a regular expression · must be given"),
        ("data.packing", "`concat` or `fit` or `null` · default `null`"),
        ("driver.watchdog.join_s", "number of seconds, more than 0 · default `120.0`"),
        ("model.family", "one of llama, mistral"),
    ],
)
def test_a_key_has_its_type_its_unit_its_default_and_what_is_allowed(name, says):
    assert says in keys.entry(every_key()[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_options_and_an_example_in_the_page(name):
    text = (ROOT / "docs" / "commands.md").read_text().partition(f"\n## `gangway {name}`\n")[2].partition("\n## ")[0]
    assert f"\ngangway {name} " in text
    assert "\n- `" in text
    assert "\n  " not in text, "indented text would be part of the list before it"


def test_every_metric_of_the_system_is_in_the_page():
    assert [name for name in sorted(published.SYSTEM) if f"`{name}`" not in METRICS] == []
    assert [prefix for prefix in published.SYSTEM_PREFIXES if f"`{prefix}" not in METRICS] == ["counted/"], "never shown"


def imported():
    """The names of the packages that the programs of the documents and the examples import."""
    programs = [block.text for block in blocks("python")] + [path.read_text() for path in (ROOT / "examples").rglob("*.py")]
    for node in (node for text in programs for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)):
        if node.module and node.module.partition(".")[0] in OURS:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_name_that_a_document_or_an_example_imports_is_in_the_page():
    modules = {"trainers.protocol", "trainers.runtime"}
    parts = [name.partition(":") for part in api.PARTS for name in part.names]
    known = {f"{module}.{name}" for module, _, name in parts}
    assert set(imported()) - modules <= known
    assert all(f"### `{name}`\n\n`from {module} import {name}`\n" in PYTHON for module, _, name in parts)
    assert len({name for _, _, name in parts}) == len(parts), "two headings of one name"
    assert all(f"`from {name} import " in PYTHON for name in modules)


def word_runs(text):
    """The runs of words of each paragraph, without code, tables, and the targets of links, which differ from page to page."""
    for paragraph in re.split(r"\n\s*\n|^\|.*$|^ *[-*] ", FENCE.sub("\n\n", text), flags=re.M):
        words = re.sub(r"\]\([^)]*\)", "]", paragraph).split()
        yield from (" ".join(words[first : first + COPIED_WORDS]) for first in range(len(words) - COPIED_WORDS + 1))


def test_a_paragraph_stands_in_one_page():
    """A copy goes stale: the paragraph stays where it belongs, and the other page links to it."""
    page_of, copies = {}, {}
    for path in (path for path in DOCUMENTS if path not in PAGES):
        for run in word_runs(path.read_text()):
            if page_of.setdefault(run, path.name) != path.name:
                copies.setdefault((page_of[run], path.name), run)
    assert copies == {}
