"""All parts of the tests are run, what one of them says is not lost, and no test gives up on a busy machine."""

from __future__ import annotations

import ast
import re

import pytest

from tests import ROOT, parts

TEST = """
def test_it(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("hypothesispytest") == {0}, "the plugin"
    assert {0}
"""


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


def test_the_parts_with_ray_do_without_hypothesis():
    paths = [path for name in ("ray", "faults") for path in (ROOT / "tests" / name).glob("*.py")]
    assert paths
    assert not [path for path in paths if re.search(r"^(from|import) hypothesis", path.read_text(), re.MULTILINE)]


@pytest.mark.costs("starts pytest twice, as `make test` does")
def test_what_the_part_beside_says_is_shown_and_counts(tmp_path, monkeypatch, capfd):
    for name, holds in (("beside", False), ("without", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(TEST.format(holds))
    monkeypatch.setattr(parts, "WITHOUT_RAY", (str(tmp_path / "without"),))
    monkeypatch.setattr(parts, "WITH_RAY", {"beside": (str(tmp_path / "beside"),)})
    monkeypatch.setattr(parts, "RESULTS", tmp_path / "results")
    assert parts.main("1", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)) == 1
    told = capfd.readouterr().out
    assert told.index("1 passed") < told.index("1 failed") < told.index("The part 'beside' ended with exit status 1:")
    assert told.splitlines()[-1].startswith("  beside/test_beside.py::test_it: assert False")
    assert "'unit'" not in told


RESULT = """<testsuites><testsuite>
  <testcase classname="tests.ray.test_a" file="tests/ray/test_a.py" name="test_good"/>
  <testcase classname="tests.ray.test_a" file="tests/ray/test_a.py" name="test_bad[x]"><failure message="{message}">
    a long story
tests/ray/test_a.py:12: AssertionError</failure></testcase>
  <testcase classname="tests.ray.test_b" file="tests/ray/test_b.py" name="test_set_up"><error message="failed on setup">
tests/ray/test_b.py:3: OSError</error></testcase>
  <testcase classname="" name="tests.ray.test_c"><error message="collection failure">no module</error></testcase>
</testsuite></testsuites>"""


def test_every_failure_is_told_once_more_at_the_end_with_its_message(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    message = "a score of many words: " + "x" * 300
    parts.result_of("ray").write_text(RESULT.format(message=message))
    assert [*parts.failures({"unit": 0, "ray": 1, "faults": parts.NO_TESTS})] == [
        "\nThe part 'ray' ended with exit status 1:",
        f"  tests/ray/test_a.py::test_bad[x]: {message} (tests/ray/test_a.py:12: AssertionError)",
        "  tests/ray/test_b.py::test_set_up: failed on setup (tests/ray/test_b.py:3: OSError)",
        "  ::tests.ray.test_c: collection failure (no module)",
    ]


def test_a_part_that_was_killed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    assert [*parts.failures({"unit": -9})] == [
        "\nThe part 'unit' ended with exit status -9:",
        "  no test of it failed; see what it wrote above",
    ]


WAITS = ("run", "wait", "communicate", "join", "get", "wait_until", "timeout")
NOT_FOR_WHAT_MUST_COME = {
    "tests/multihost/test_accelerator.py": "it is a benchmark of many minutes",
    "tests/ray/test_own_ray.py": "processes of which some never end",
    "tests/unit/cluster/placement/test_waits.py": "a clock of its own",
}


def seconds_of_waits(source):
    """(line, seconds) of each call that waits for so many seconds, written as a number, and no longer."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = [each.value for each in node.keywords if each.arg in ("timeout", "timeout_s")]
            given += node.args[1:2] if name == "wait_until" else node.args[:1]
            numbers = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, (int, float))]
            yield from ((node.lineno, number) for number in numbers if name in WAITS and number >= 2)


@pytest.mark.costs("reads all tests")
def test_no_test_gives_up_on_a_busy_machine():
    """It takes ten times as long as a quiet one. Tests wait for PATIENCE_S, and pytest ends what hangs."""
    found = {
        str(path.relative_to(ROOT)): waits
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (waits := [*seconds_of_waits(path.read_text())])
    }
    assert found.keys() == NOT_FOR_WHAT_MUST_COME.keys(), found


@pytest.mark.parametrize(
    "call", ["process.wait(60)", "subprocess.run(command, timeout=20)", "wait_until(done, 5.0)", "pytest.mark.timeout(900)"]
)
def test_a_wait_of_some_seconds_is_found(call):
    assert len([*seconds_of_waits(f"first\n{call}")]) == 1
