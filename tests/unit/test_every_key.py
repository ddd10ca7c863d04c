"""Every key of the configuration has a test that fails if the key is ignored. `tests/unit/data/tests_of_keys.yaml` names it.

That it does fail is proved by `make mutants ARGS=--ignore-keys`, which takes minutes; here the names are checked.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests import ROOT
from tests.unit.config_keys import TABLE, Key, declared, every_key, read_tests, sets
from trainers.config.arguments import from_dict

WHAT_TO_ADD = (
    "Write a test that sets the key and fails if the program ignores it, and add the line `{key}: PATH::TEST` to "
    f"{TABLE.relative_to(ROOT)}. `make mutants ARGS='--ignore-keys {{key}}'` runs that test with the key ignored: it must fail."
)


@pytest.mark.parametrize("name", every_key())
def test_a_key_has_a_test_that_sets_it(name):
    assert name in declared(), f"the key {name} has no test. " + WHAT_TO_ADD.format(key=name)
    path, _, test = declared()[name].partition("::")
    assert (ROOT / path).is_file(), f"{name}: there is no {path}"
    assert test in read_tests(path), f"{name}: {path} has no {test}"
    assert sets(read_tests(path)[test], every_key()[name]), f"{name}: {test} does not set it. " + WHAT_TO_ADD.format(key=name)


def test_the_table_has_no_keys_that_are_gone():
    assert not declared().keys() - every_key().keys()
    assert list(declared()) == sorted(declared()), "the keys of the table are in the order of the alphabet"


def test_a_key_of_a_section_in_a_list_and_in_a_mapping_is_a_key():
    assert {"seed", "optimizer.groups", "optimizer.groups.frozen", "evaluation.units.task", "hosts.count"} <= every_key().keys()
    assert "optimizer" not in every_key()


def test_an_ignored_key_reads_as_its_default_and_is_checked_all_the_same():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Section:
        rate: float = 1.0
        pattern: str

        def __post_init__(self):
            if self.rate < 0:
                raise ValueError("rate")

    rate, pattern = dataclasses.fields(Section)
    Key("section.rate", Section, rate).ignore()
    assert (Section(rate=2.0, pattern="a").rate, Section(rate=2.0, pattern="a").pattern) == (1.0, "a")
    assert dataclasses.replace(Section(pattern="a"), rate=3.0).rate == 1.0
    with pytest.raises(ValueError, match="rate"):
        Section(rate=-1.0, pattern="a")
    Key("section.pattern", Section, pattern).ignore()
    assert Section(pattern="a").pattern == "ignored"


def test_a_section_without_checks_that_a_file_gives_is_ignored_too(monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Section:
        rate: float = 1.0

    (rate,) = dataclasses.fields(Section)
    Key("section.rate", Section, rate).ignore()
    assert from_dict(Section, {"rate": 2.0}).rate == 1.0
