"""The ceilings of journeys through the product (`tests/ceilings.toml`), and what commits made of all ceilings."""

import json

import pytest

from tests import ROOT, costs
from tests.ceilings import (
    FILE,
    assert_none,
    broken_chains,
    entries_changed,
    journey_rows,
    lowest,
    off_ceiling,
    parse,
    raised_silently,
)
from tests.journeys import count, figures
from tests.reach import git


def test_no_journey_becomes_longer(tmp_path):
    ceilings = parse(FILE.read_text())
    found = journey_rows(figures(count(tmp_path)))
    # What has come is what `python -m tests.journeys --json` lists, and did not list at an older commit.
    assert_none(off_ceiling(ceilings.of_journeys, found, ceilings.lag))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the project lies here without its history")
def test_no_ceiling_was_raised_without_an_entry():
    ceilings = parse(FILE.read_text())
    commits = git("log", "--format=%H", "--", str(FILE.relative_to(ROOT))).split()
    earlier = [parse(git("show", f"{commit}:{FILE.relative_to(ROOT)}")) for commit in commits]
    raises = [entry for table in earlier for entry in table.raises]
    silent = raised_silently(lowest(table.rows for table in earlier), ceilings.rows, ceilings.raises)
    assert_none([*silent, *entries_changed(raises, ceilings.raises)])


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the project lies here without its history")
def test_no_ceiling_of_a_test_file_was_raised_without_an_entry():
    """But for a change of the lock file: other libraries, other costs."""
    path, table = costs.CEILINGS.relative_to(ROOT), costs.read_ceilings()
    since = git("log", "-1", "--format=%H", "--", "requirements.lock").strip()
    commits = git("log", "--format=%H", f"{since}..", "--", str(path)).split()
    earlier = [json.loads(git("show", f"{commit}:{path}")) for commit in commits]
    silent = raised_silently(lowest(map(costs.rows_in_force, earlier)), costs.rows_in_force(table), costs.raises(table))
    entries = [entry for each in earlier for entry in costs.raises(each)]
    assert_none(
        [*silent, *entries_changed(entries, costs.raises(table)), *broken_chains(costs.base_rows(table), costs.raises(table))]
    )
