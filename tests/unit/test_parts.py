"""Both parts of the tests are run, and what one of them says is not lost."""

from __future__ import annotations

import pytest

from tests import ROOT, parts

TEST = "def test_it():\n    assert {}\n"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((0, 0), 0),
        ((0, 5), 0),
        ((5, 0), 0),
        ((5, 5), 5),
        ((1, 0), 1),
        ((0, 1), 1),
        ((5, 1), 1),
        ((1, 5), 1),
        ((1, 2), 2),
        ((0, -9), -9),
    ],
)
def test_a_part_that_failed_is_the_status_and_one_without_tests_is_not(statuses, expected):
    assert parts.status_of(statuses) == expected


def test_each_file_is_in_one_part():
    given = [files for part in (parts.WITHOUT_RAY, *parts.WITH_RAY.values()) for files in part]
    left_out = {one.removeprefix("--ignore=") for one in given if one.startswith("--ignore=")}
    alone = {one for one in given if one.endswith(".py") and not one.startswith("--")}
    folders = sorted(one for one in given if not one.endswith(".py"))
    assert folders == sorted({f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")} | {"tests/unit"})
    assert left_out == alone


@pytest.mark.costs("starts pytest twice, as `make test` does")
def test_what_the_part_beside_says_is_shown_and_counts(tmp_path, monkeypatch, capfd):
    for name, holds in (("without", True), ("beside", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(TEST.format(holds))
    monkeypatch.setattr(parts, "WITHOUT_RAY", (str(tmp_path / "without"),))
    monkeypatch.setattr(parts, "WITH_RAY", {"beside": (str(tmp_path / "beside"),)})
    monkeypatch.setattr(parts, "SHOWN_LATER", tmp_path / "beside.log")
    assert parts.main("1", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)) == 1
    told = capfd.readouterr().out
    assert told.index("1 passed") < told.index("1 failed")
