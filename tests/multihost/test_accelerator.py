"""The accelerator protocol as a person calls it, on a CPU: `python -m benchmarks.accelerator --small`."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.accelerator import DONE, FAILED, OUT_OF_MEMORY, TIMED_OUT, in_child
from tests import ROOT

WINGS = ("benchmarks",)

SCRIPT = "import pathlib, subprocess, sys, time; folder = pathlib.Path({folder!r}); "


def child(tmp_path, code, limit_s=60.0):
    return in_child([sys.executable, "-c", SCRIPT.format(folder=str(tmp_path)) + code], tmp_path, limit_s)


def test_a_measurement_tells_its_result_or_its_error(tmp_path):
    assert child(tmp_path, "(folder / 'answer.json').write_text('{\"a\": 1}')") == {"status": DONE, "result": {"a": 1}}
    failed = child(tmp_path, "raise ValueError('no such thing')")
    assert failed["status"] == FAILED
    assert failed["error"].endswith("ValueError: no such thing")
    assert child(tmp_path, "sys.exit('RESOURCE_EXHAUSTED: Out of memory')")["status"] == OUT_OF_MEMORY
    assert child(tmp_path, "pass")["status"] == FAILED  # an earlier answer is not taken for its own


def test_a_measurement_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    code = (
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "(folder / 'pid').write_text(str(started.pid)); print('waits', flush=True); time.sleep(600)"
    )
    found = child(tmp_path, code, limit_s=3.0)
    assert found == {"status": TIMED_OUT, "error": "not done after 3 s: waits"}
    pid = int((tmp_path / "pid").read_text())
    while is_running(pid):
        time.sleep(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    """Runs the command, and returns a function that runs it again."""
    folder = tmp_path_factory.mktemp("accelerator")
    absent = tmp_path_factory.mktemp("absent")
    for name in ("ray", "mlflow"):  # what the machine of a person who runs it need not have
        (absent / f"{name}.py").write_text(f"raise ImportError('{name} is imported')\n")
    # Of one device: the flags of the other tests make eight.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(absent)}

    def run(*options):
        command = [sys.executable, "-m", "benchmarks.accelerator", "--small", "--out", str(folder), *options]
        return subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1700)

    return folder, run(), run


@pytest.mark.timeout(1800)
@pytest.mark.slow("runs the whole protocol, in some thirty processes")
def test_the_whole_protocol_runs_on_a_cpu_and_a_second_start_has_nothing_to_measure(protocol):
    folder, done, run = protocol
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = json.loads((folder / "results.json").read_text())["measurements"]
    assert {record["status"] for record in records.values()} == {DONE}
    results = {name: record["result"] for name, record in records.items()}
    assert {name.split()[0] for name in results} == {
        *("device", "speed", "plan", "kernel", "programs", "resume", "resume,", "saves", "profile")
    }
    for name in ("resume", "resume, deterministic"):
        resumed = results[name]
        assert {what: resumed[f"same_{what}"] for what in ("losses", "parameters", "samples")} == dict.fromkeys(
            ("losses", "parameters", "samples"), True
        )
        assert resumed["resumed_step"] == resumed["saved_step"] < resumed["killed_after_step"]
        assert {"halt", "join", "restore", "compile", "first step"} <= set(resumed["phases_s"])
    programs = results["programs"]
    assert programs["same_losses"]
    assert programs["refused_when_loaded"] == 0
    assert programs["refused_when_damaged"] == programs["files"] > 0
    assert all(result["largest_difference"] < 0.02 for name, result in results.items() if name.startswith("kernel"))
    assert all(result["tokens_per_s"] > 0 for name, result in results.items() if name.startswith("speed"))
    assert all(result["memory"]["peak"] > 0 for name, result in results.items() if name.startswith("plan"))
    assert results["saves"]["ours"] > 0
    assert list((folder / results["profile"]["folder"]).rglob("*.xplane.pb"))
    assert not [path for path in folder.iterdir() if path.name.startswith("measurement-")]
    table = (folder / "table.md").read_text()
    assert table in done.stdout
    assert "| kill to next step at most 5 s |" in table
    again = run()
    assert again.returncode == 0
    assert [line.split(" ...")[0] for line in again.stdout.splitlines() if " ... " in line] == ["device"]
    assert "error: " in run("model.width=32").stderr
