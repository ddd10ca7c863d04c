"""What a run of the tests says is not lost, and no test gives up on a busy machine."""

from __future__ import annotations

import ast
import os

import hypothesis
import pytest

from tests import ROOT, compile_cache, costs, environment, fuzz, ledger, reach, run

TEST = """
def test_it(pytestconfig):
    assert not pytestconfig.pluginmanager.hasplugin("hypothesispytest"), "the plugin"
    assert {}
"""


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_a_failure_is_the_status_and_the_last_line(tmp_path, monkeypatch, capfd, num_workers):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    for name, holds in (("one", False), ("other", True)):
        (tmp_path / f"test_{name}.py").write_text(TEST.format(holds))
    results = {name: tmp_path / name for name in ("RESULTS", "RESULT", "SLOW_FILES")}
    for name, path in results.items():
        monkeypatch.setattr(run, name, path)
    monkeypatch.setattr(ledger, "FOLDER", tmp_path / "ledger")
    options = ("--workers", num_workers, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    assert run.main(("test", *options)) == 1
    told = capfd.readouterr().out
    # At once, for a run that somebody stops; and at the end.
    assert told.index("test_one.py::test_it failed in its call: assert False") < told.index("1 failed")
    assert told.index("1 failed") < told.index("The tests ended with exit status 1:")
    assert told.splitlines()[-1].startswith("  test_one.py::test_it: assert False")


@pytest.mark.parametrize(
    ("tiers", "tests", "complaints", "expected"),
    [
        (["test"], 0, [], (0, [])),
        (["test"], 0, ["test_a.py costs too much"], (1, [])),
        (["test"], 1, [], (1, [])),
        (["all"], 0, [], (0, ["proved but for "])),
        (["all"], 0, ["test_a.py costs too much"], (1, [])),
        (["all"], 1, [], (1, ["proved but for tests/ray/test_a.py"])),
        (["all", "test"], 1, [], (1, [])),
        (["all"], 2, [], (2, [])),
    ],
)
def test_a_run_that_passes_is_a_success_unless_a_file_is_too_dear(
    tmp_path, monkeypatch, capsys, tiers, tests, complaints, expected
):
    for name in ("RESULTS", "RESULT"):
        monkeypatch.setattr(run, name, tmp_path / name)
    monkeypatch.setattr(ledger, "FOLDER", tmp_path / "ledger")
    monkeypatch.setattr(costs, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(costs, "measured_yardstick_s", lambda: 0.6)
    monkeypatch.setattr(costs, "too_dear", lambda *_: iter(complaints))
    monkeypatch.setattr(run, "run_pytest", lambda *_: tests)
    monkeypatch.setattr(run, "failed_files", lambda result: {"tests/ray/test_a.py"})
    monkeypatch.setattr(reach, "prove", lambda failed: f"proved but for {' '.join(failed)}")
    status = run.main(tiers)
    printed = capsys.readouterr().out.splitlines()
    assert (status, [line for line in printed if line.startswith("proved")]) == expected
    assert [line for line in printed if line in complaints] == (complaints if tests == 0 else [])


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
    message = "a score of many words: " + "x" * 300
    monkeypatch.setattr(run, "RESULT", tmp_path / "result.xml")
    run.RESULT.write_text(RESULT.format(message=message))
    assert [*run.failures(0)] == []
    assert [*run.failures(1)] == [
        "\nThe tests ended with exit status 1:",
        f"  tests/ray/test_a.py::test_bad[x]: {message} (tests/ray/test_a.py:12: AssertionError)",
        "  tests/ray/test_b.py::test_set_up: failed on setup (tests/ray/test_b.py:3: OSError)",
        "  ::tests.ray.test_c: collection failure (no module)",
    ]


def test_which_files_failed(tmp_path):
    result = tmp_path / "result.xml"
    assert run.failed_files(result) is None  # pytest was killed
    result.write_text(RESULT.format(message=""))
    assert run.failed_files(result) is None  # a file could not be read: nobody knows which tests it has
    lines = RESULT.format(message="").splitlines()
    result.write_text("\n".join(line for line in lines if "collection failure" not in line))
    assert run.failed_files(result) == {"tests/ray/test_a.py", "tests/ray/test_b.py"}


def test_a_run_that_was_killed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RESULT", tmp_path / "result.xml")
    assert [*run.failures(-9)] == [
        "\nThe tests ended with exit status -9:",
        "  no test failed; see what was written above",
    ]


def test_what_was_compiled_is_kept_for_the_same_libraries_python_and_processor():
    one = environment.cache_key(b"jax==1", "3.11", "processor: 0\nflags: sse avx2\n")
    assert one == environment.cache_key(b"jax==1", "3.11", "processor: 1\nflags: sse avx2\n")
    assert one != environment.cache_key(b"jax==2", "3.11", "flags: sse avx2\n")
    assert one != environment.cache_key(b"jax==1", "3.12", "flags: sse avx2\n")
    assert one != environment.cache_key(b"jax==1", "3.11", "flags: sse\n")


def test_it_is_kept_where_the_user_says_or_in_the_users_cache(tmp_path):
    assert environment.cache_folder({"GANGWAY_TESTS_CACHE": str(tmp_path / "a")}).parent == tmp_path / "a"
    assert environment.cache_folder({"XDG_CACHE_HOME": str(tmp_path / "b")}).parent == tmp_path / "b" / "gangway-tests"
    assert environment.cache_folder({"HOME": str(tmp_path / "c")}).parent == tmp_path / "c" / ".cache" / "gangway-tests"
    (tmp_path / "file").touch()
    assert environment.cache_folder({"HOME": str(tmp_path / "file")}).is_relative_to(environment.BUILD)


def test_the_oldest_of_what_was_compiled_goes_first(tmp_path):
    for age, name in enumerate(("new", "deeper/middle", "old")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 40)
        os.utime(path, (1000 - age, 1000 - age))
    compile_cache.delete_oldest(tmp_path, 90)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["middle", "new"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_test_sees_nothing_that_another_one_has_set(number):
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    os.environ.update(JAX_COMPILATION_CACHE_DIR="elsewhere", JAX_PLATFORMS="tpu")


WAITS = ("run", "wait", "communicate", "join", "get", "wait_until", "timeout")
NOT_FOR_WHAT_MUST_COME = {
    "tests/multihost/test_accelerator.py": "it is a benchmark of many minutes",
    "tests/ray/test_own_ray.py": "processes of which some never end",
    "tests/unit/gangway/test_waits.py": "a clock of its own",
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


def test_no_test_gives_up_on_a_busy_machine():
    """It takes ten times as long as a quiet one. Tests wait for PATIENCE_S, and pytest ends what hangs."""
    found = {
        str(path.relative_to(ROOT)): waits
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (waits := [*seconds_of_waits(path.read_text())])
    }
    assert found.keys() == NOT_FOR_WHAT_MUST_COME.keys(), found


def test_a_property_has_no_limit_on_time_and_the_same_cases_each_time():
    found = hypothesis.settings()
    assert found.deadline is None
    assert hypothesis.HealthCheck.too_slow in found.suppress_health_check
    assert found.derandomize == (fuzz.SEED not in os.environ)
    assert hypothesis.core.global_force_seed == (fuzz.seed(0) if fuzz.SEED in os.environ else None)


@pytest.mark.parametrize(
    "call", ["process.wait(60)", "subprocess.run(command, timeout=20)", "wait_until(done, 5.0)", "pytest.mark.timeout(900)"]
)
def test_a_wait_of_some_seconds_is_found(call):
    assert len([*seconds_of_waits(f"first\n{call}")]) == 1
