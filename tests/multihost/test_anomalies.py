"""Batches that are not trained on, on two hosts: both decide alike, and the bits are those of a run told to skip them."""

from __future__ import annotations

import json

import pytest

from tests.multihost import harness
from tests.multihost.test_elastic import eight
from tests.programs.processes import PATIENCE_S

WINGS = ("trainers/loop", "trainers/step", "trainers/diagnostics")

PLAIN, TROUBLED = "trainers.base:BaseTrainer", "tests.programs.troubled:"
COMPARED = ("params_digest", "samples_digest", "skipped_batches", "steps", "batches", "lineage")


def run(folder, trainer=PLAIN, *, host=1, batch=4, start=harness.run, policy="skip", **how):
    made = eight(folder, trainer=trainer, anomalies={"non_finite": policy, "skip_before": 1})
    env = {"TROUBLE": json.dumps({"host": host, "batch": batch})}
    return start(made, folder / "logs", hosts=2, devices_per_host=1, env=env, **how)


def digests(host):
    result = harness.result(host)
    return {name: result[name] for name in COMPARED}


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """What a run is that was told to skip batches 3 and 4."""
    (first, second) = map(digests, run(tmp_path_factory.mktemp("ordered"), skip_batches=[3, 4]))
    assert first == second
    assert first["skipped_batches"] == [3, 4]
    return first


@pytest.mark.slow("starts the processes of several hosts")
def test_a_nan_on_one_host_is_skipped_by_both_as_on_order(tmp_path, ordered):
    found = run(tmp_path, TROUBLED + "Poisoned", skip_batches=[3])
    assert digests(found[0]) == digests(found[1]) == ordered
    assert [event["action"] for event in found[0].of("anomaly")] == ["skip"]
    assert found[1].of("anomaly") == []  # host 0 tells for all


@pytest.mark.slow("starts the processes of several hosts")
def test_a_rollback_outlives_its_processes(tmp_path, ordered):
    """A process dies before the next checkpoint: the file alone knows which batches to leave out."""
    hosts = run(tmp_path, TROUBLED + "DiesOfRollback", policy="rollback", start=harness.start)
    anomaly = hosts[0].wait_for("anomaly")
    assert (anomaly["batch_index"], anomaly["skipped_batches"], anomaly["restored_step"]) == (4, [3, 4], 3)
    assert hosts[1].child.wait_gone(PATIENCE_S)
    harness.kill(hosts)
    again = run(tmp_path, TROUBLED + "Poisoned", policy="rollback")
    assert digests(again[0]) == digests(again[1]) == ordered
    assert again[0].of("anomaly") == []


@pytest.mark.slow("starts the processes of several hosts")
def test_a_host_that_skips_a_step_is_found_at_once_and_named(tmp_path):
    """Host 0 tells what it heard from all; the other may die of its end before it can tell anything."""
    hosts = run(tmp_path, TROUBLED + "SkipsAStep", start=harness.start)
    event = hosts[0].wait_for("exception")
    assert (event["type"], event["kind"], event["deterministic"]) == ("DesyncError", "desync", False)
    assert "out of step at batch 4" in event["message"]
    assert "(host 0 at 4; host 1 at 5); a host has skipped or repeated a step" in event["message"]
    assert event["batch_indices"] == [4, 5]
    harness.kill(hosts)
