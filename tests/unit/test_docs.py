"""What the documents name is there."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from tests import ROOT, index, site
from tests.unit.documents import DOCUMENTS, FENCE
from tests.unit.test_arrows import FLOORS

CAPABILITIES = (ROOT / "docs" / "capabilities.md").read_text()
ROWS = re.findall(r"^\| ([PFVONMES]\d+) \| (.*?) \| (done|part|not yet) \| (.*) \|$", CAPABILITIES, re.M)
LAST = {"P": 20, "F": 14, "V": 10, "O": 19, "N": 14, "M": 16, "E": 10, "S": 7}
"""The number of the last row of each letter."""
LONGEST_WHAT = 160
"""Characters of the column `what`."""


def test_every_row_has_a_state():
    ids = [row[0] for row in ROWS]
    assert len(ids) == len(set(ids))
    numbers = {letter: {int(i[1:]) for i in ids if i[0] == letter} for letter in LAST}
    assert numbers == {letter: set(range(1, last + 1)) for letter, last in LAST.items()}


def test_no_line_of_a_table_is_left_out_of_the_rows():
    lines = [line for line in CAPABILITIES.splitlines() if re.match(r"\| \w+\d", line)]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [row[0] for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_no_cell_is_cut_off(row):
    """A cell cut at a length most often ends inside code or a bracket; one cut at a comma or a small word ends with that."""
    name, what, _, cell = row
    assert 10 <= len(what) <= LONGEST_WHAT, name
    assert not re.search(r"([,;:(/-]|\b(a|an|and|at|by|for|in|of|or|that|the|to|with))$", what), name
    for text in (what, cell):
        assert text.count("`") % 2 == 0, f"{name}: {text}"
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing), f"{name}: {text}"


@pytest.mark.parametrize(("row", "state", "cell"), [(row[0], row[2], row[3]) for row in ROWS])
def test_the_tests_that_a_row_names_exist(row, state, cell):
    named = re.findall(r"`(tests/[^`]*)`", cell)
    assert named or state != "done"
    for reference in named:
        path, _, tests = reference.partition("::")
        for file in path.split(", "):
            assert (ROOT / file).is_file(), f"{row}: {file}"
        for test in filter(None, tests.split(", ")):
            assert f"def {test}(" in (ROOT / path).read_text(), f"{row}: {reference}"


def test_a_row_that_is_not_done_says_what_is_missing():
    assert [row[0] for row in ROWS if row[2] == "part" and not re.search(r"\*open\*: \w", row[3])] == []
    assert [row[0] for row in ROWS if row[2] == "not yet" and not row[3].strip()] == []


def test_the_tests_that_show_what_is_said_of_security_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) >= 4
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text(), f"{path}::{test}"


def headings(path):
    """The names by which others link to the headings of a document."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def test_the_paths_that_documents_name_exist():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?://|#)([^)]+)\)", document.read_text()):
            name, _, heading = link.partition("#")
            assert (document.parent / name).is_file(), f"{document.name} links to {link}"
            assert not heading or heading in headings(document.parent / name), f"{document.name} links to {link}"
        for path in re.findall(
            r"`((?:orchestrator|trainers|cluster|tests|configs|docs|benchmarks)/[\w./-]+\.\w+)`", document.read_text()
        ):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_the_configurations_are_in_order():
    from orchestrator.config.job import load

    for path in (ROOT / "configs").glob("*.yaml"):
        config = load(path)
        assert config.training.name == path.stem
        assert yaml.safe_load(path.read_text())["hosts"] == {"count": 2}


def test_the_floors_of_the_architecture_are_those_of_the_arrows():
    text = (ROOT / "docs" / "architecture.md").read_text()
    tables = re.findall(r"^\| floor \| `(\w+)/` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    drawn = {
        package: [set(re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[2])) for row in rows.splitlines()]
        for package, rows in tables
    }
    # Without the programs that are named after a wing.
    floors_of = {package: [{wing for wing in floor if "." not in wing} for floor in floors] for package, floors in FLOORS.items()}
    assert drawn == floors_of


def rows_to_add():
    """The table "To add" of CONTRIBUTING: (the word of the example, files of the packages, files beside them)."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## To add")[2].partition("| other things")[0]
    for row in re.findall(r"^\| an? .*$", text, re.M):
        _, _, example, _, files, beside, _ = row.split("|")
        (word,) = re.findall(r"`(.*?)`", example)
        yield word, set(re.findall(r"`(.*?)`", files)), set(re.findall(r"`(.*?)`", beside))


@pytest.mark.parametrize(("word", "files", "beside"), [*rows_to_add()])
def test_what_is_added_is_known_in_the_files_that_contributing_names_and_in_no_other(word, files, beside):
    sources = [path for package in ("gangway", "trainers", "cluster", "orchestrator") for path in (ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in sources if re.search(rf"\b{word}\b", path.read_text())} == files
    assert all(re.search(rf"\b{word}\b", (ROOT / name).read_text()) for name in beside)


def test_the_page_of_files_is_what_they_say_of_themselves():
    assert index.PAGE.read_text() == index.page(), "make files"
    assert "|  |" not in index.PAGE.read_text(), "a file says nothing of itself"


def test_the_menu_of_the_site_has_each_page_once():
    menu = tomllib.loads((site.DOCS / "site" / "zensical.toml").read_text())["project"]["nav"]
    pages = sorted(page for item in menu for value in item.values() for page in pages_of(value))
    assert pages == sorted([*(path.name for path in site.DOCS.glob("*.md")), *site.BESIDE.values()])


def test_each_page_has_the_title_that_the_menu_gives_it():
    menu = tomllib.loads((site.DOCS / "site" / "zensical.toml").read_text())["project"]["nav"]
    titles = {page: title for item in menu for title, value in item.items() for title, page in titled(title, value)}
    beside = {page: ROOT / name for name, page in site.BESIDE.items()}
    headed = {page: beside.get(page, site.DOCS / page).read_text().partition("\n")[0] for page in titles}
    assert headed == {page: f"# {title}" for page, title in titles.items()} | {"index.md": "# gangway"}


def titled(title, value):
    """The pages below an entry of the menu, with their titles."""
    if isinstance(value, str):
        return [(title, value)]
    return [pair for item in value for inner, page in item.items() for pair in titled(inner, page)]


def pages_of(value):
    return [page for _, page in titled("", value)]


def test_links_between_documents_are_links_between_pages(tmp_path):
    site.lay(tmp_path / "work")
    for page in (tmp_path / "work" / "pages").glob("*.md"):
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).is_file(), f"{page.name} links to {link}"


@pytest.mark.parametrize("document", [*DOCUMENTS, index.PAGE, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_each_table_begins_with_the_names_of_its_columns(document):
    """A table that an empty line cuts in two is text from there on."""
    lines = FENCE.sub("", document.read_text()).splitlines()
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|[-:| ]+\|", after), line


def test_names_and_options_in_code_stay_on_one_line_of_the_site():
    page = (
        "<p><code>--adapter</code> <code>gangway run CONFIG --dry-run --all</code> <code>{}</code></p><code>a --b <i>c</i></code>"
    )
    assert site.whole_names(page.format("tests/" + "long_" * 6)) == (
        '<p><code class="whole">--adapter</code> <code>gangway run CONFIG <span class="whole">--dry-run</span> '
        '<span class="whole">--all</span></code> <code>tests/long_long_long_long_long_long_</code></p><code>a --b <i>c</i></code>'
    )


def test_the_tool_of_the_site_is_the_one_of_its_group():
    (tool,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    assert tool in (ROOT / "tests" / "site.txt").read_text().splitlines()


@pytest.mark.parametrize("day", sorted((ROOT / "tests" / "days").glob("*.sh")), ids=lambda day: day.stem)
def test_each_command_of_a_first_day_is_on_the_page_that_stands_above_it(day):
    lines = day.read_text().splitlines()
    call = r"^ *(shows|ends|behind) .*(gangway|ray) |^ *kill -9 "
    called = [number for number, line in enumerate(lines) if re.search(call, line)]
    for number in called:
        named = re.fullmatch(r" *# ([\w/]+\.md): (.+)", lines[number - 1])
        assert named, f"{day.name}: no page above `{lines[number].strip()}`"
        assert named[2] in (ROOT / named[1]).read_text(), f"{day.name}: {named[1]} has no `{named[2]}`"
    assert called or day.stem == "day"
