"""Several hosts: the same losses as one, checkpoints that any number of hosts can go on from, decisions taken together."""

from __future__ import annotations

import json

import numpy as np
import pytest

from orchestrator.failures.classify import classify
from orchestrator.failures.post_mortem import read_post_mortem
from tests.multihost import harness
from tests.programs import crashing_user
from tests.programs.mistaken import mistake
from tests.programs.processes import PATIENCE_S
from tests.saved import saved
from trainers.config.arguments import TrainingArguments, from_dict

WINGS = ("trainers/runtime", "trainers/loop", "trainers/parallel", "trainers/worker.py")


def arguments(tmp_path, **changes):
    base = {
        "name": "run",
        "storage": str(tmp_path),
        "global_batch_size": 16,
        "accumulation_steps": 2,
        "max_num_steps": 6,
        "publish_every_steps": 1,
        "model": {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "mlp_width": 64},
        "data": {"sequence_length": 16, "paths": [__file__], "eval_fraction": 0.2},
        "optimizer": {"learning_rate": 0.01, "schedule": {"name": "cosine", "decay_steps": 6}},
        "checkpoint": {"save_steps": 3},
        "previews": {"num_tokens": 4},
    }
    return from_dict(TrainingArguments, {**base, **changes})


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """What every mesh and every number of hosts must reproduce: one process, eight devices, data parallel."""
    folder = tmp_path_factory.mktemp("one")
    (host,) = harness.run(arguments(folder), folder / "logs", hosts=1, devices_per_host=8)
    return host


MESHES = ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8}, {"data": 1, "fsdp": 8}, {"data": 2, "tensor": 4})


@pytest.mark.slow("starts the processes of two hosts")
@pytest.mark.parametrize("mesh", MESHES)
def test_two_hosts_of_four_devices_give_the_losses_of_one_of_eight(tmp_path, one_process, mesh):
    made = arguments(tmp_path, mesh=mesh, trainer="tests.programs.mesh_groups:NotesMeshGroups")
    hosts = harness.run(made, tmp_path / "logs", hosts=2, devices_per_host=4)
    for host, told in enumerate(hosts):
        check_groups(host, json.loads(told.of("note")[0]["message"]), {"data": 1, "fsdp": 1, "tensor": 1, **mesh})
    expected, got = harness.losses(one_process), harness.losses(hosts[0])
    assert list(got) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(got.values()), list(expected.values()), rtol=5e-5)
    assert harness.result(hosts[0])["samples_digest"] == harness.result(one_process)["samples_digest"]
    assert harness.result(hosts[0])["eval_loss"] == pytest.approx(harness.result(one_process)["eval_loss"], rel=1e-4)
    # All but what is measured.
    assert without_times(hosts[0]) == without_times(hosts[1])


def without_times(host):
    return {name: value for name, value in harness.result(host).items() if name != "throughput"}


def check_groups(host, found, mesh):
    """Of the first of this host's four devices."""
    assert found["root"] == [4 * host, 8, host, 2]
    places = np.unravel_index(4 * host, tuple(mesh.values()))
    for (name, size), place in zip(mesh.items(), places, strict=True):
        over_hosts = 2 if size > 1 and name == next(axis for axis in mesh if mesh[axis] > 1) else 1  # the outermost one
        assert found[name] == [place, size, host if over_hosts == 2 else 0, over_hosts]
    assert found["expert"] == found["slice"] == [0, 1, 0, 1]


@pytest.mark.slow("starts the processes of several hosts")
def test_a_checkpoint_of_two_hosts_is_gone_on_from_by_one(tmp_path, one_process):
    harness.run(arguments(tmp_path, max_num_steps=3, mesh={"fsdp": 2}), tmp_path / "two", hosts=2, devices_per_host=1)
    (host,) = harness.run(arguments(tmp_path), tmp_path / "one", hosts=1, devices_per_host=4)
    assert host.of("restored")[0]["step"] == 3
    expected = harness.losses(one_process)
    np.testing.assert_allclose([harness.losses(host)[s] for s in (4, 5, 6)], [expected[s] for s in (4, 5, 6)], rtol=5e-5)
    assert harness.result(host)["samples_digest"] == harness.result(one_process)["samples_digest"]


@pytest.mark.slow("starts the processes of several hosts")
def test_a_stop_wish_of_one_host_stops_both_at_the_same_step(tmp_path):
    made = arguments(tmp_path, max_num_steps=100_000)
    hosts = harness.start(made, tmp_path / "logs", hosts=2, devices_per_host=1)
    hosts[1].wait_for("first_step")
    hosts[1].child.send({"cmd": "stop", "reason": "requested"})
    done = [host.wait_for("done") for host in hosts]
    assert {event["stop_reason"] for event in done} == {"requested"}
    assert done[0]["result"]["steps"] == done[1]["result"]["steps"] < 100_000
    assert f"/{done[0]['result']['steps']}-" in done[0]["result"]["checkpoint"]
    for host in hosts:
        assert host.child.wait_gone(PATIENCE_S)
        assert host.exit.code == 0


@pytest.mark.slow("starts the processes of several hosts")
def test_a_damaged_checkpoint_is_passed_over_by_both_hosts(tmp_path):
    from tests.unit.training import flip_a_byte

    harness.run(arguments(tmp_path), tmp_path / "first", hosts=2, devices_per_host=1)
    flip_a_byte(saved(tmp_path / "run", 6) / "state")
    hosts = harness.run(arguments(tmp_path, max_num_steps=7), tmp_path / "second", hosts=2, devices_per_host=1)
    for host in hosts:
        assert host.of("restored")[0]["step"] == 3
        assert [bad["step"] for bad in host.of("restored")[0]["skipped"]] == [6]


def test_an_error_is_reported_with_its_kind_and_its_traceback(tmp_path):
    hosts = harness.start(arguments(tmp_path, task="tests.multihost.test_hosts:Broken"), tmp_path, hosts=1, devices_per_host=1)
    event = hosts[0].wait_for("exception")
    assert (event["type"], event["kind"]) == ("ZeroDivisionError", "user")
    assert "in loss" in event["traceback"]
    assert hosts[0].child.wait_gone(PATIENCE_S)
    assert hosts[0].exit.code == 1


@pytest.mark.slow("starts hosts; another error of theirs is reported in `make test`")
def test_an_error_of_a_callback_is_reported_with_its_line(tmp_path):
    made = arguments(tmp_path, trainer="tests.programs.mistaken:WithTheCallback")
    hosts = harness.start(made, tmp_path, hosts=1, devices_per_host=1)
    event = hosts[0].wait_for("exception")
    assert (event["type"], event["user_frame"]) == ("ValueError", mistake(2))


@pytest.mark.parametrize("number", ["SIGSEGV", "SIGABRT"])
def test_a_process_that_crashes_leaves_the_line_of_the_users_code(tmp_path, number):
    made = arguments(tmp_path, trainer=f"tests.programs.crashing_user:{number}")
    (host,) = harness.start(made, tmp_path, hosts=1, devices_per_host=1)
    assert host.child.wait_gone(PATIENCE_S)
    exit = {"code": None, "signal": host.exit.signal, "t": 0.0, "log_tail": host.child.log_tail()}
    found = classify([read_post_mortem(0, {"exit": exit, "clock_s": 0.0}, 0.0)])
    line = crashing_user.line_of(number)
    assert found.summary == f"host 0: training process ended by {number}, in {line}"
    assert found.evidence["line"] == line


class Broken:
    """A task whose loss is wrong only once it is traced for real, after the preparation."""

    def __new__(cls, arguments):
        from trainers.tasks.causal_lm import CausalLMTask

        class Fails(CausalLMTask):
            traced = 0

            def loss(self, model, batch):
                type(self).traced += 1
                return super().loss(model, batch) if self.traced == 1 else 1 / 0

        return Fails(arguments)
