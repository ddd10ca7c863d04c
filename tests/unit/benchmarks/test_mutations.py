"""Which faults are put into a module, which are drawn, and which tests they meet."""

from __future__ import annotations

import pytest

from benchmarks.mutants import EQUIVALENT, equivalents, imports, rings_of, sample
from benchmarks.mutations import mutants_of
from tests import ROOT


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("a < b", {"a < b -> a <= b", "a < b -> pass"}),
        ("x = a and not b", {"a and (not b) -> a or not b", "not b -> b"}),
        ("x = -a * 2", {"-a -> a", "-a * 2 -> -a / 2", "2 -> 3"}),
        ("x = 'a' + b", set()),
        ("x: int = f(a, b=c)", {"f(a, b=c) -> f(a)"}),
        ("if a:\n    b()", {"a -> not a", "b() -> pass"}),
        ("def f():\n    return a", {"return a -> return None"}),
        ("def f():\n    return None", set()),
        ("for a in b:\n    break", {"break -> continue"}),
        ("a[0] += 1", {"a[0] += 1 -> pass", "a[0] += 1 -> a[0] -= 1", "0 -> 1", "1 -> 2"}),
        ("x = [a for a in b if a]", {"a -> not a"}),
        ("def f(a: int | None, *, b=True) -> int | None: ...", {"True -> False"}),
        ("class A:\n    '''Text.'''\n    limit_s: float = 3.0\n    kept = 3.0", {"3.0 -> 4.0"}),
        ("raise ValueError(f'{a + 1}')", {"raise ValueError(f'{a + 1}') -> pass"}),
    ],
)
def test_the_faults_of_a_text(source, changes):
    found = mutants_of("a.py", source)
    assert {mutant.change for mutant in found} == changes
    assert len({mutant.key for mutant in found}) == len(found)


def test_a_mutant_has_as_many_lines_and_one_change():
    source = "def f(é,\n      b):\n    return g(é,\n             b) + 'ü'[0]\n\n\ndef last(): ...\n"
    for mutant in mutants_of("a.py", source):
        assert len(mutant.source.splitlines()) == len(source.splitlines())
        assert mutant.source.endswith("\n\n\ndef last(): ...\n")


def test_a_seed_draws_the_same_and_a_larger_count_more():
    path = "orchestrator/policies/restart.py"
    few, more = (sample(ROOT, path, count, seed=3) for count in (4, 9))
    assert few == sample(ROOT, path, 4, seed=3)
    assert {mutant.key for mutant in few} < {mutant.key for mutant in more}
    assert {mutant.key for mutant in few} != {mutant.key for mutant in sample(ROOT, path, 4, seed=4)}


@pytest.mark.slow("reads all tests")
def test_a_mutant_meets_the_tests_of_its_module_then_those_of_its_wing_then_those_beside_the_wings():
    own, wing, whole = rings_of(ROOT, "trainers/optim/pruning.py")
    assert "tests/unit/trainers/optim/test_pruning.py" in own
    assert "tests/unit/trainers/optim/test_schedules.py" in wing
    assert "tests/unit/trainers/test_base.py" in whole
    assert len({*own, *wing, *whole}) == len([*own, *wing, *whole])
    assert not [test for test in (*wing, *whole) if "orchestrator" in test]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from trainers.step import rng", True),
        ("from trainers.step.rng import keys", True),
        ("patch('trainers.step.rng.x')", True),
        ("from trainers.step import rngs", False),
        ("import trainers.step.rngs", False),
    ],
)
def test_which_tests_import_a_module(text, found):
    assert imports(text, ["trainers", "step", "rng"]) == found


@pytest.mark.slow("reads all modules")
def test_each_equivalent_mutant_is_one_of_the_present_text():
    for path, line, change in equivalents(EQUIVALENT):
        text = (ROOT / path).read_text()
        lines = text.splitlines()
        changes = {mutant.change for mutant in mutants_of(path, text) if lines[mutant.line - 1].strip() == line}
        assert change in changes, f"{EQUIVALENT.name}: {path} has no {change!r} in the line {line!r}; delete or mend the row"
