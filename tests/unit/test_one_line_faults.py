"""The faults that are made by hand fit the code: each changes one place of its file, and what comes of it is Python.

Whether a test finds them is measured by `make mutants ARGS=--hand-made`.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import mutants
from tests import PACKAGES, ROOT

FILE = ROOT / "tests" / "data" / "one_line_faults.toml"
LEAST = 3
GAP = "\n\n\n"
FEWER = {
    "cluster": (0, "its one module has imports of Ray's private names, and a table of why they are used"),
}
"""Wings with less code than faults: how many they have at least, and why."""

FAULTS = tomllib.loads(FILE.read_text())["fault"]
IDS = [fault["id"] for fault in FAULTS]


def wing_of(path: str) -> str:
    """Returns the first-level folder of a package that a module is in; of a module directly in a package, the package."""
    return "/".join(Path(path).parent.parts[:2])


def wings() -> list[str]:
    """Returns the wings of the tree."""
    folders = [path for package in PACKAGES for path in sorted((ROOT / package).iterdir()) if (path / "__init__.py").is_file()]
    return [*PACKAGES, *(str(folder.relative_to(ROOT)) for folder in folders)]


def around(text: str, place: int) -> tuple[int, int]:
    """Returns where the definition at a place of a source begins and ends: the formatter leaves two empty lines around each."""
    end = text.find(GAP, place)
    return max(0, text.rfind(GAP, 0, place)), len(text) if end < 0 else end


def mend(fault: dict[str, str], problem: str) -> str:
    """Returns the message of a failure: which row it is, and what to do."""
    return (
        f"{FILE.relative_to(ROOT)}, row {fault['id']} ({fault['path']}): {problem}. The code was changed: write the row's `old` "
        "and `new` as the code is now, with the same fault; if what the row says cannot go wrong any more, replace the row by "
        "another fault of its wing"
    )


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_a_fault_changes_one_place_of_its_file_and_leaves_python(fault):
    file = ROOT / fault["path"]
    assert file.is_file(), mend(fault, "there is no such file")
    text = file.read_text()
    count = text.count(fault["old"])
    assert count == 1, mend(fault, f"`old` is in the file {count} times, expected once: {fault['old']!r}")
    # Only the definition around it: to parse whole files takes five times as long.
    begin, end = around(text, text.index(fault["old"]))
    before = text[begin:end]
    assert before.count(fault["old"]) == 1, mend(fault, "`old` is not within one definition")
    try:
        changed = ast.parse(before.replace(fault["old"], fault["new"]))
    except SyntaxError as error:
        pytest.fail(mend(fault, f"with `new` it is not Python ({error}): {fault['new']!r}"))
    assert ast.dump(changed) != ast.dump(ast.parse(before)), mend(fault, "`new` says the same as `old`")


def test_each_row_has_an_id_of_its_own_that_names_its_wing():
    assert [name for name, count in Counter(IDS).items() if count > 1] == [], f"{FILE.name}: number these rows anew"
    wrong = [fault["id"] for fault in FAULTS if fault["id"].rpartition("-")[0] != wing_of(fault["path"]).replace("/", "-")]
    assert wrong == [], f"{FILE.name}: these ids do not begin with the wing of their path"


def test_each_row_says_what_goes_wrong():
    unclear = [fault["id"] for fault in FAULTS if len(fault["what"].split()) < 5 or not fault["what"].endswith(".")]
    assert unclear == [], f"{FILE.name}: `what` is a sentence about what a user notices"


def test_each_wing_has_faults():
    count = Counter(wing_of(fault["path"]) for fault in FAULTS)
    least = {wing: FEWER.get(wing, (LEAST, ""))[0] for wing in wings()}
    lacking = {wing: f"{count[wing]} of {number}" for wing, number in least.items() if count[wing] < number}
    assert lacking == {}, f"{FILE.name}: add faults to these wings, or a row with the reason to FEWER"
    assert FEWER.keys() <= set(wings()), "FEWER names wings that are gone"


def test_make_mutants_puts_them_in():
    made = mutants.hand_made(ROOT, ["trainers/step"])
    rows = [row for row in FAULTS if row["path"].startswith("trainers/step")]
    assert [mutant.before for mutant in made] == [row["id"] for row in rows]
    for mutant, row in zip(made, rows, strict=True):
        assert row["new"] in mutant.source
        assert row["old"].splitlines()[0].strip() in (ROOT / row["path"]).read_text().splitlines()[mutant.line - 1]
