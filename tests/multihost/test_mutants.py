"""`make mutants` on a small tree: a test that holds, one that does not, and a fault that hangs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.programs.processes import PATIENCE_S

WINGS = ("benchmarks",)

MODULE = """
def is_more(a, b):
    return a > b


def count_down(n):
    while n > 0:
        n -= 1
    return "done"
"""
HOLDS = """
from trainers.sums import count_down, is_more


def test_it():
    assert is_more(2, 1) is True
    assert count_down(1) == "done"
"""
AND_EQUAL = "    assert is_more(1, 1) is False\n"
RUN = "import benchmarks.mutants as command; command.LEAST_LIMIT_S = 10.0; command.main()"


def mutants(root, *options):
    """The results by change, of a whole run on the tree."""
    results = root.parent / "work" / "results.jsonl"
    command = [sys.executable, "-c", RUN, "trainers", "--root", str(root), "--results", str(results), "--count", "99", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["change"]: line["outcome"] for line in lines}, done.stdout


@pytest.fixture
def root(tmp_path):
    (tmp_path / "tree" / "trainers").mkdir(parents=True)
    (tmp_path / "tree" / "tests" / "unit" / "trainers").mkdir(parents=True)
    (tmp_path / "tree" / "trainers" / "sums.py").write_text(MODULE)
    return tmp_path / "tree"


@pytest.mark.slow("puts faults into a copy of the tree")
def test_what_a_test_does_not_see_survives_and_a_run_goes_on(root):
    test = root / "tests" / "unit" / "trainers" / "test_sums.py"
    test.write_text(HOLDS)
    outcomes, text = mutants(root)
    assert outcomes.pop("a > b -> a >= b") == "survived"
    assert outcomes.pop("n -= 1 -> pass") == outcomes.pop("n -= 1 -> n += 1") == "timeout"
    assert outcomes.pop("n > 0 -> n >= 0") == outcomes.pop("1 -> 2") == outcomes.pop("0 -> 1") == "survived"
    assert outcomes.pop("n > 0 -> not n > 0") == "survived"
    assert outcomes == {"return a > b -> return None": "killed", "return 'done' -> return None": "killed"}
    assert "- trainers/sums.py:3: `a > b -> a >= b` (comparison)" in text
    assert "| trainers/sums.py | 9 | 2 | 2 | 5 | 0 |" in text
    assert (root / "trainers" / "sums.py").read_text() == MODULE

    test.write_text(HOLDS + AND_EQUAL)
    results = root.parent / "work" / "results.jsonl"
    kept = [line for line in results.read_text().splitlines(keepends=True) if "a >= b" not in line]
    results.write_text("".join(kept))  # only this one is tried again
    outcomes, text = mutants(root)
    assert outcomes["a > b -> a >= b"] == "killed"
    assert text.count("trainers/sums.py:3: ") == 1  # the others were not tried again
    assert results.read_text().startswith("".join(kept))


@pytest.mark.slow("puts faults into a copy of the tree")
def test_a_test_that_fails_without_a_fault_kills_nothing(root):
    (root / "tests" / "unit" / "trainers" / "test_sums.py").write_text(HOLDS)
    (root / "tests" / "unit" / "trainers" / "test_broken.py").write_text(
        "import trainers.sums\n\n\ndef test_it():\n    assert 0\n"
    )
    outcomes, text = mutants(root, "--count", "3")
    assert "left out: tests/unit/trainers/test_broken.py fails without a mutant" in text
    assert "survived" in outcomes.values()


@pytest.mark.slow("puts faults into a copy of the tree")
def test_what_only_a_slow_test_sees_survives_without_the_slow_tests(root):
    (root / "trainers" / "sums.py").write_text("def is_more(a, b):\n    return a > b\n")
    (root / "tests" / "unit" / "trainers" / "test_sums.py").write_text(
        "import pytest\nfrom trainers.sums import is_more\n\n\ndef test_more():\n    assert is_more(2, 1) is True\n\n\n"
        f'@pytest.mark.slow("why")\ndef test_equal():\n{AND_EQUAL}'
    )
    assert mutants(root, "--without-slow")[0]["a > b -> a >= b"] == "survived"
    (root.parent / "work" / "results.jsonl").unlink()
    assert mutants(root)[0]["a > b -> a >= b"] == "killed"
