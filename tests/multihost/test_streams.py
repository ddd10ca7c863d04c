"""Data without an index on two hosts: the same samples as on one; the end of one host's data is the end for all; its state."""

from __future__ import annotations

import dataclasses

import pytest

from tests.multihost import harness
from tests.multihost.harness import losses, result, run
from tests.programs.processes import PATIENCE_S
from tests.strikes import Folder
from trainers.config import CheckpointConfig
from trainers.config.arguments import TrainingArguments, from_dict

WINGS = ("trainers/data",)


def arguments(tmp_path, dataset):
    return from_dict(
        TrainingArguments,
        {
            "name": dataset,
            "storage": str(tmp_path),
            "task": "tests.programs.tiny:TableTask",
            "global_batch_size": 8,
            "max_num_steps": 100,
            "publish_every_steps": 1,
            "data": {"sequence_length": 8, "dataset": f"tests.programs.streams:{dataset}"},
            "optimizer": {"schedule": {"decay_steps": 20}},
            "evaluation": {"max_batches": 1},
        },
    )


@pytest.mark.slow("starts the processes of several hosts")
def test_where_the_data_of_one_host_ends_training_ends_on_all_with_the_same_samples(tmp_path):
    one = run(arguments(tmp_path, "even"), tmp_path / "one", hosts=1, devices_per_host=2)[0]
    two = run(arguments(tmp_path, "uneven"), tmp_path / "two", hosts=2, devices_per_host=1)
    for host in (one, *two):
        assert host.wait_for("done")["stop_reason"] == "end_of_data"
        assert result(host)["steps"] == 9
        assert result(host)["samples"] == 70
        assert result(host)["samples_digest"] == result(one)["samples_digest"]
    assert losses(two[0]).keys() == losses(one).keys()


@pytest.mark.slow("starts the processes of several hosts")
def test_the_wait_for_data_is_that_of_the_slowest_host(tmp_path):
    made = dataclasses.replace(arguments(tmp_path, "slow_elsewhere"), max_num_steps=12)
    hosts = run(made, tmp_path / "two", hosts=2, devices_per_host=1)
    wall_s = sum(event["metrics"]["step_time_s"] for event in hosts[0].of("metrics") if "step_time_s" in event["metrics"])
    waited_s = sum(event.get("seconds", {}).get("data_wait", 0.0) for event in hosts[0].of("metrics"))
    # Host 0 itself waits for host 1 inside its steps, and not for its data.
    assert waited_s > wall_s / 4


@pytest.mark.slow("starts the processes of several hosts")
def test_streams_with_a_state_go_on_where_they_were_on_two_hosts_and_by_counting_on_one(tmp_path):
    made = dataclasses.replace(
        arguments(tmp_path / "cut", "even"),
        trainer="tests.programs.streams:OwnStreams",
        max_num_steps=8,
        checkpoint=CheckpointConfig(save_steps=3),
    )
    faults = Folder(tmp_path / "faults")
    faults.order(1, "kill", at=7)  # the save at step 6 waits for the one before it
    hosts = harness.start(made, tmp_path / "first", hosts=2, devices_per_host=1, env=faults.env)
    with hosts[1].changed:
        assert hosts[1].changed.wait_for(lambda: hosts[1].exit is not None, PATIENCE_S)
    harness.kill(hosts)
    again = run(made, tmp_path / "again", hosts=2, devices_per_host=1)
    whole_run = dataclasses.replace(made, storage=str(tmp_path / "whole"))
    whole = run(whole_run, tmp_path / "other", hosts=2, devices_per_host=1)
    restored = again[0].of("restored")[0]["step"]
    assert restored in (3, 6)
    assert {name: result(again[0])[name] for name in ("params_digest", "samples_digest", "batches")} == {
        name: result(whole[0])[name] for name in ("params_digest", "samples_digest", "batches")
    }
    for host, undisturbed in zip(again, whole, strict=True):
        assert drawn(host) == drawn(undisturbed) - restored
    assert not told(again, "state of the data") + told(again, "cannot be positioned")
    # On another number of hosts each reads other rows: the states are of no use there.
    longer = dataclasses.replace(made, max_num_steps=9)
    (one,) = run(longer, tmp_path / "one", hosts=1, devices_per_host=2)
    assert told([one], "it was saved by 2 hosts, and the run has 1 now; the data is read again up to its position")
    assert drawn(one) > 8


def told(hosts, text):
    return [event["message"] for host in hosts for event in host.of("note") if text in event["message"]]


def drawn(host):
    (note,) = told([host], "drawn here: ")
    return int(note.rpartition(" ")[2])
