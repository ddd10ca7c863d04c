"""A run of the tests has a ledger, and a file that costs more than its ceiling is named."""

import json
import os

import pytest

from tests import costs, ledger
from tests.ledger import SHARED, Ledger
from tests.programs.processes import wait_until

TABLE = {
    "yardstick_s": 0.5,
    "tiers": {"test": 100},
    "files": {"tests/unit/test_a.py": {"fast": 10, "all": 30}, "tests/unit/test_b.py": {"fast": 4}},
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "CEILINGS", tmp_path / "costs.json")
    monkeypatch.setattr(costs, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(ledger, "FOLDER", tmp_path / "ledger")
    costs.write(TABLE)
    return TABLE


def lines(*rows):
    return [{"test": test, "slow": slow, "wall_s": 1.0, "cpu_s": {"own": seconds}} for test, slow, seconds in rows]


def complaints(monkeypatch, found, *, run_cpu_s=50.0, yardstick_s=0.5, alone_s=float("inf"), tiers=("test",)):
    monkeypatch.setattr(ledger, "read", lambda *_: iter(found))
    monkeypatch.setattr(costs, "cost_alone", lambda file, seconds: alone_s)
    return [*costs.too_dear(tiers, run_cpu_s, yardstick_s)]


def test_a_file_above_its_ceiling_is_named_when_it_is_alone_too(table, monkeypatch):
    dear = lines(("tests/unit/test_b.py::test_it", False, 3.0), ("tests/unit/test_b.py::test_other", False, 2.0))
    (told,) = complaints(monkeypatch, dear, alone_s=4.5)
    assert told.startswith(
        "tests/unit/test_b.py costs 5.0 CPU-s, and 4.5 alone; it may cost 4 (tests/costs.json). Make it cheaper"
    )
    assert complaints(monkeypatch, dear, alone_s=3.5) == []


def test_the_yardstick_of_a_slow_machine_makes_its_seconds_comparable(table, monkeypatch):
    dear = lines(("tests/unit/test_b.py::test_it", False, 6.0))
    assert complaints(monkeypatch, dear, yardstick_s=1.0) == []
    assert len(complaints(monkeypatch, dear, yardstick_s=0.7)) == 1
    # Of one that is more than 1.5 times slower, the ceilings are higher by the rest.
    assert complaints(monkeypatch, lines(("tests/unit/test_b.py::test_it", False, 10.5)), yardstick_s=1.0) == []
    assert len(complaints(monkeypatch, lines(("tests/unit/test_b.py::test_it", False, 11.0)), yardstick_s=1.0)) == 1


def test_slow_tests_have_another_ceiling_than_those_of_every_commit(table, monkeypatch):
    fast, slow = ("tests/unit/test_a.py::test_it", False, 9.0), ("tests/unit/test_a.py::test_long", True, 20.0)
    assert complaints(monkeypatch, lines(fast)) == []
    assert complaints(monkeypatch, lines(fast, slow)) == []
    assert len(complaints(monkeypatch, lines(("tests/unit/test_a.py::test_it", False, 11.0)))) == 1
    assert len(complaints(monkeypatch, lines(fast, ("tests/unit/test_a.py::test_long", True, 22.0)))) == 1


def test_a_new_file_without_a_line_fails(table, monkeypatch):
    (told,) = complaints(monkeypatch, lines(("tests/unit/test_new.py::test_it", False, 0.1)))
    assert told.startswith("tests/unit/test_new.py has no line in tests/costs.json.")


def test_slow_tests_of_a_file_that_were_never_measured_have_no_ceiling_yet(table, monkeypatch):
    assert complaints(monkeypatch, lines(("tests/unit/test_b.py::test_long", True, 60.0))) == []


def test_a_tier_above_its_ceiling_fails(table, monkeypatch):
    assert complaints(monkeypatch, [], run_cpu_s=99) == []
    assert complaints(monkeypatch, [], run_cpu_s=101) == ["The tier test costs 101 CPU-s; it may cost 100 (tests/costs.json)"]
    assert complaints(monkeypatch, [], run_cpu_s=101, tiers=("all",)) == []


def test_an_entry_raises_a_ceiling(table, monkeypatch):
    why = "each of its tests starts a gang now"
    costs.write({**TABLE, "raises": [{"row": "tests/unit/test_b.py: fast", "old": 4, "new": 6, "part": "27", "why": why}]})
    assert complaints(monkeypatch, lines(("tests/unit/test_b.py::test_it", False, 5.0))) == []


def test_ceilings_are_written_from_kept_runs_and_never_become_higher(table, tmp_path):
    (tmp_path / "kept").mkdir()
    for number, seconds in enumerate((1.0, 2.0, 30.0)):
        files = {name: {"fast": seconds, "slow": 0.0} for name in ("tests/unit/test_ledger.py", "tests/unit/test_docs.py")}
        about = {"yardstick_s": 0.5, "files": files, "cpu_s": 1, "wall_s": 1}
        (tmp_path / "kept" / f"{number}.json").write_text(json.dumps(about))
    costs.write(
        {**TABLE, "files": {"tests/unit/test_docs.py": {"fast": 3.1, "all": 9.0}, "tests/unit/test_gone.py": {"fast": 1.0}}}
    )
    costs.write_ceilings()
    assert costs.read_ceilings()["files"] == {
        "tests/unit/test_docs.py": {"fast": 3.1, "all": 9.0},
        "tests/unit/test_ledger.py": {"fast": 4.5},
    }


def test_the_sum_of_a_run_is_that_of_its_tests_and_of_what_they_share(table, monkeypatch):
    found = lines(("tests/unit/test_a.py::test_it", False, 8.0), (SHARED, False, 2.0))
    monkeypatch.setattr(ledger, "read", lambda *_: iter(found))
    told = " ".join(costs.summary(10.0, 60.0, 1.0))
    assert "The run took 1.0 min and 10 CPU-s, 5 by the yardstick" in told
    assert "The ledger has 10 of them, 2 shared by all tests" in told


def test_a_line_has_the_seconds_of_a_test_by_cause(table, monkeypatch):
    import jax
    import jax.numpy as jnp

    written = Ledger()
    written._charge(SHARED)
    os.posix_spawn("/bin/sh", ["sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"], os.environ)
    jax.jit(lambda x: jnp.sin(x) * 3.25)(jnp.ones(7))
    assert wait_until(lambda: os.waitpid(-1, os.WNOHANG)[0])
    written._charge("tests/unit/test_a.py::test_it", slow=True)
    shared, line = ledger.read(ledger.FOLDER)
    assert shared["test"] == SHARED
    assert (line["test"], line["slow"]) == ("tests/unit/test_a.py::test_it", True)
    assert {"own", "compile", "commands"} <= line["cpu_s"].keys()
    assert all(seconds > 0 for seconds in line["cpu_s"].values())
