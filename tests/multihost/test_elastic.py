"""Other numbers of hosts: where a run is cut for them, what it goes on with, what it tells of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gangway.storage.opening import place_of
from gangway.storage.row import Row
from tests.multihost import harness
from tests.multihost.test_hosts import arguments

WINGS = ("trainers/checkpoint", "trainers/loop", "trainers/runtime")


def stretch(batch_index, hosts):
    mesh = {"data": hosts, "fsdp": 1, "expert": 1, "tensor": 1}
    return {"batch_index": batch_index, "num_hosts": hosts, "num_devices": hosts, "mesh": mesh}


def eight(tmp_path, **changes):
    small = {"task": "tests.programs.tiny:TableTask", "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"}}
    return arguments(tmp_path, global_batch_size=8, **{"accumulation_steps": 1, **small, **changes})


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (host,) = harness.run(eight(folder), folder / "logs", hosts=1, devices_per_host=1)
    return host


@pytest.fixture(scope="module")
def three_then_two(tmp_path_factory):
    """Batches 0 to 3 on three hosts, which eight rows do not divide over, then two; the results of both."""
    folder = tmp_path_factory.mktemp("cut")
    three = harness.run(eight(folder), folder / "three", hosts=3, devices_per_host=1, stop_at=4)
    two = harness.run(eight(folder), folder / "two", hosts=2, devices_per_host=1)
    return folder, three, two


@pytest.mark.slow("starts the processes of several hosts")
def test_all_hosts_stop_where_they_are_reported_to(three_then_two):
    _, three, _ = three_then_two
    for host in three:
        assert host.of("done")[0]["stop_reason"] == "resize"
        assert harness.result(host)["batches"] == 4
        assert [event["step"] for event in host.of("saved")] == [3, 4]  # every host tells, so that each save can be watched
        assert [event["step"] for event in host.of("saving")] == [3, 4]


def test_three_hosts_go_on_as_two_with_the_same_samples_and_losses(three_then_two, on_one):
    _, three, two = three_then_two
    assert two[0].of("restored")[0]["step"] == 4
    expected, got = harness.losses(on_one), harness.losses(three[0]) | harness.losses(two[0])
    assert list(got) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(got.values()), list(expected.values()), rtol=5e-5)
    assert harness.result(two[0])["samples_digest"] == harness.result(on_one)["samples_digest"]
    assert harness.result(two[0])["samples"] == harness.result(on_one)["samples"] == 48
    assert harness.result(two[0])["eval_loss"] == pytest.approx(harness.result(on_one)["eval_loss"], rel=1e-4)


def test_the_lineage_tells_on_what_each_stretch_was_trained(three_then_two, on_one):
    _, three, two = three_then_two
    assert harness.result(on_one)["lineage"] == [stretch(0, 1)]
    assert harness.result(three[0])["lineage"] == [stretch(0, 3)]
    assert harness.result(two[0])["lineage"] == harness.result(two[1])["lineage"] == [stretch(0, 3), stretch(4, 2)]


def test_a_replay_of_the_lineage_gives_the_same_bits(three_then_two, tmp_path):
    """Of a run that was cut at another place by accident: here, by nothing but its orders."""
    _, _, two = three_then_two
    made = eight(tmp_path, checkpoint={})
    harness.run(made, tmp_path / "three", hosts=3, devices_per_host=1, stop_at=4)
    again = harness.run(made, tmp_path / "two", hosts=2, devices_per_host=1)
    assert harness.result(again[0])["params_digest"] == harness.result(two[0])["params_digest"]


@pytest.mark.slow("starts the processes of several hosts")
def test_what_a_precompilation_compiled_is_not_compiled_again(tmp_path):
    made, programs = eight(tmp_path, checkpoint={}), tmp_path / "programs"
    about = {"hosts": 2, "devices_per_host": 2, "env": {"GANGWAY_PROGRAMS": str(programs)}, "program_key": "launch"}
    harness.run(made, tmp_path / "precompilation", cmd="precompile", **about)
    precompiled = written(programs)
    # An executable and the note of what it was made from; one for both hosts, whichever place they have.
    assert sorted(name.partition("-")[0] for name in precompiled) == ["fingerprints"] * 2 + ["train_step"] * 2
    assert not Path(made.storage, made.name).exists()
    orders = {"skip_batches": [1], "stop_at": 4}
    trained = harness.run(made, tmp_path / "run", **about, **orders)
    assert precompiled.items() <= written(programs).items()
    assert [name for name in written(programs).keys() - precompiled.keys() if not name.startswith("eval_step")] == []
    untouched = harness.run(eight(tmp_path / "other", checkpoint={}), tmp_path / "plain", hosts=2, devices_per_host=2, **orders)
    assert harness.result(trained[0])["params_digest"] == harness.result(untouched[0])["params_digest"]


@pytest.mark.parametrize("mesh", [{"data": 2}, {"fsdp": 2}])
@pytest.mark.slow("starts the processes of several hosts")
def test_a_loaded_step_that_accumulates_gradients_gives_the_same_bits(tmp_path, mesh):
    """Over and over: its collectives, of which there are several, might run in another order each time."""
    env = {"GANGWAY_PROGRAMS": str(tmp_path / "programs")}
    digests = set()
    for life in range(4):
        made = eight(tmp_path / str(life), accumulation_steps=2, mesh=mesh, checkpoint={})
        hosts = harness.run(
            made, tmp_path / f"logs-{life}", hosts=2, devices_per_host=1, env=env, quickly_compiled=False, program_key="launch"
        )
        digests.add(harness.result(hosts[0])["params_digest"])
    assert len(digests) == 1


def written(folder: Path) -> dict[str, int]:
    """By name, the inode: each write makes another one."""
    return {path.name: path.stat().st_ino for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow("starts hosts")
def test_a_notice_on_one_host_makes_all_save_and_stop_at_one_step(tmp_path):
    import signal

    hosts = harness.start(eight(tmp_path, max_num_steps=100_000), tmp_path / "logs", hosts=2, devices_per_host=1)
    hosts[1].wait_for("first_step")
    hosts[1].child.signal(signal.SIGTERM)
    harness.to_the_end(hosts)
    assert [(event["reason"], event["deadline_s"]) for event in hosts[1].of("notice")] == [("SIGTERM", None)]
    assert hosts[0].of("notice") == []
    ends = [(host.of("done")[0]["stop_reason"], harness.result(host)["batches"]) for host in hosts]
    assert ends[0] == ends[1]
    assert ends[0][0] == "preempted"
    saved = [host.of("saved")[-1]["step"] for host in hosts]
    assert saved == [ends[0][1]] * 2


def test_another_driver_forbids_checkpoints_until_it_has_taken_the_process_over(tmp_path):
    made = eight(tmp_path, max_num_steps=100_000, checkpoint={})
    row = Row(place_of(made.run_folder) / "row")
    row.take_over({"hostname": "first"})
    hosts = harness.start(made, tmp_path / "logs", hosts=1, devices_per_host=1, driver_term=1)
    hosts[0].wait_for("first_step")
    row.take_over({"hostname": "second"})
    hosts[0].child.send({"cmd": "save"})
    assert "the run belongs to driver term 2, generation 0 on second" in hosts[0].wait_for("save_failed")["error"]
    assert hosts[0].of("saved") == []
    hosts[0].child.send({"cmd": "taken_over", "driver_term": 2})
    hosts[0].child.send({"cmd": "save"})
    hosts[0].wait_for("saved")
    assert row.newest().term == (2, 0)
    harness.kill(hosts)


def test_heartbeats_tell_how_long_a_host_was_busy_by_itself(three_then_two):
    _, three, _ = three_then_two
    beats = [event for host in three for event in host.of("heartbeat")]
    assert all(event["busy_s"] >= 0 for event in beats)
    for host in three:
        busy = [event["busy_s"] for event in host.of("heartbeat")]
        assert busy == sorted(busy)
    assert json.dumps(beats)
