"""What a person is told who is called at night: `gangway status` and `gangway incidents` say where, why and what was done."""

from __future__ import annotations

import shutil

import pytest

from orchestrator.runs import incidents, status
from tests.faults import test_storage
from tests.programs import troubled
from tests.ray.jobs import run_job, settings
from tests.ray.machines import own_ray
from tests.strikes import Folder, Striking, checkpoint

WINGS = ("orchestrator/failures", "orchestrator/runs", "orchestrator/driver", "trainers/diagnostics")

pytestmark = pytest.mark.slow("whole jobs that fail")

HERE = troubled.__file__
small_disk = test_storage.small_disk


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray(3):
        yield


def told(capsys, tmp_path):
    """What the two commands say of the run: of a pipe, an incident is a line."""
    said = []
    for command in (status, incidents):
        capsys.readouterr()
        assert command.main([str(tmp_path / "job")]) == 0
        said.append(capsys.readouterr().out)
    return said


def line_of(function):
    """The place of the first line of `strike`, as an error names it."""
    number = function.strike.__code__.co_firstlineno + 1
    return f"{HERE}, line {number}, in strike"


WAYS = {
    "a mistake of the user's": (
        "Mistaken",
        {},
        ["host 1: KeyError at step 4: 'columns'", line_of(troubled.Mistake)],
        "→ give up: the same user_error at step 4 twice in a row",
    ),
    "native code that crashes": (
        "Crashes",
        {"driver": {"restart": {"max_failures": 1}}},
        ["host 1: training process ended by SIGSEGV", line_of(troubled.Crash)],
        "→ give up: 2 failures without a new checkpoint in between (driver.restart.max_failures = 1)",
    ),
    "a hang": (
        "Hangs",
        {"driver": {"watchdog": {"step_floor_s": 3.0, "step_factor": 1.0}}},
        ["host 1 hangs in train: strike (troubled.py:"],
        "→ give up: the same hang at step 3 twice in a row: it would happen for ever (if it is only slow there, give it longer",
    ),
    "a batch that is not finite": (
        "Poisoned",
        {"anomalies": {"non_finite": "skip"}},
        ["a loss or gradient that is not finite in batch 4", "or a callback changed the batch"],
        "→ skipped",
    ),
    "a slow host": (
        "IsSlow",
        {"driver": {"stragglers": {"windows": 2, "window_s": 0.5}}, "max_num_steps": 40},
        ["host 1 is slower than the others: busy 0.2"],
        "→ watched",
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_status_and_incidents_say_where_why_and_what_was_done(tmp_path, capsys, name):
    trainer, changes, parts, action = WAYS[name]
    hosts = {"count": 2, "env": {"TROUBLE": '{"host": 1, "batch": 4}'}}
    run_job(
        settings(tmp_path, **({"trainer": f"tests.programs.troubled:{trainer}", "hosts": hosts, "max_num_steps": 8} | changes))
    )
    of_run, listed = told(capsys, tmp_path)
    assert action in of_run
    for part in parts:
        assert part in of_run
        assert part in listed.splitlines()[-1]
    assert action.removeprefix("→ ").partition(":")[0] in listed.splitlines()[-1]


def test_a_folder_of_checkpoints_that_is_gone(tmp_path, capsys):
    folder = Folder(tmp_path / "faults", step_s=0.05)

    def strike():
        shutil.rmtree(tmp_path / "job" / "checkpoints")
        folder.process(1).kill()

    changes = {"driver": {"restart": {"retry_for_s": 2.0}}, "checkpoint": {"save_steps": 6}}
    made = settings(tmp_path, hosts={"count": 2, "env": folder.env}, max_num_steps=20, **changes)
    run_job(made, Striking((checkpoint(6), strike)))
    of_run, listed = told(capsys, tmp_path)
    for said in (of_run, listed.splitlines()[-1]):
        assert f"of this run was committed, and is not in {tmp_path}/job/checkpoints: there is no such folder" in said
        assert "--accept-loss" in said
        assert "give up" in said


def test_a_disk_that_is_full_at_the_end(small_disk, tmp_path, capsys):
    folder = Folder(tmp_path / "faults", step_s=0.5)

    def strike():
        test_storage.fill(small_disk, leave_mb=2)
        folder.full_speed()

    retries = {"driver": {"restart": {"retry_for_s": 3.0}}}
    made = settings(small_disk, hosts={"count": 2, "env": folder.env}, max_num_steps=11, checkpoint={"save_steps": 6}, **retries)
    summary = run_job(made, Striking((checkpoint(6), strike)))
    assert summary["generations"] == 1  # nothing was trained again
    for said in told(capsys, small_disk):
        assert f"no room in {small_disk}/job/checkpoints: 4.1 MiB needed" in said
        assert "saved is step 6, and 5 steps are lost; make room, and run the same command again" in said
        assert "give up: the storage did not take the state: nothing is trained again because of that" in said
