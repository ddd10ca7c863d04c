"""What the documents name is there."""

from __future__ import annotations

import re

import pytest
import yaml

from tests import ROOT

CAPABILITIES = (ROOT / "docs" / "capabilities.md").read_text()
ROWS = re.findall(r"^\| ([PFVON]\d+) \| (.*?) \| (done|part|not yet) \| (.*) \|$", CAPABILITIES, re.M)


def test_every_row_has_a_state():
    ids = [row[0] for row in ROWS]
    assert len(ids) == len(set(ids))
    numbers = {letter: {int(i[1:]) for i in ids if i[0] == letter} for letter in "PFVON"}
    assert {letter: len(found) for letter, found in numbers.items()} == {"P": 19, "F": 14, "V": 10, "O": 14, "N": 10}
    assert all(found == set(range(1, len(found) + 1)) for found in numbers.values())


@pytest.mark.parametrize(("row", "state", "cell"), [(row[0], row[2], row[3]) for row in ROWS if row[2] != "not yet"])
def test_the_tests_that_a_row_names_exist(row, state, cell):
    named = re.findall(r"`(tests/[^`]*)`", cell)
    assert named or state == "part"
    for reference in named:
        path, _, tests = reference.partition("::")
        for file in path.split(", "):
            assert (ROOT / file).is_file(), f"{row}: {file}"
        for test in filter(None, tests.split(", ")):
            assert f"def {test}(" in (ROOT / path).read_text(), f"{row}: {reference}"


def test_the_tests_that_show_what_is_said_of_security_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) >= 4
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text(), f"{path}::{test}"


def test_the_paths_that_documents_name_exist():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
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
