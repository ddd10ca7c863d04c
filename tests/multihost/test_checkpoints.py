"""Two hosts and one checkpoint: what one of them alone sees or cannot do is decided by both."""

from __future__ import annotations

import shutil
import signal

import jax
import pytest
from flax import nnx

from gangway.storage.opening import place_of
from tests.multihost import harness
from tests.programs.processes import PATIENCE_S
from tests.programs.tiny import TableTask
from tests.saved import saved
from trainers.base import BaseTrainer
from trainers.checkpoint import assets, layout, manifest
from trainers.config.arguments import TrainingArguments, from_dict

WINGS = ("trainers/checkpoint", "trainers/loop")

HERE = "tests.multihost.test_checkpoints"


def arguments(storage, **changes):
    base = {
        "name": "run",
        "storage": str(storage),
        "task": f"{HERE}:ShardedTableTask",
        "global_batch_size": 8,
        "max_num_steps": 6,
        "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"},
        "mesh": {"fsdp": 2},
        "checkpoint": {"save_steps": 3},
    }
    return from_dict(TrainingArguments, {**base, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The storage of a run with checkpoints of steps 3 and 6, half of each by either host."""
    folder = tmp_path_factory.mktemp("trained")
    hosts = harness.run(arguments(folder), folder / "logs", hosts=2, devices_per_host=1)
    for host in hosts:
        assert [event["step"] for event in host.of("saved")] == [3, 6]
    return folder


@pytest.mark.slow("starts the processes of several hosts")
def test_a_state_is_saved_by_two_hosts_and_loaded_again(tmp_path):
    """By `save_pretrained`, with the assets of host 0; each host loads its half."""
    hosts = harness.run(arguments(tmp_path, trainer=f"{HERE}:SavesAndLoads"), tmp_path / "logs", hosts=2, devices_per_host=1)
    for host in hosts:
        assert [note["message"] for note in host.of("note")] == ["the same bits"]
    folder = place_of(tmp_path / "saved")
    content = manifest.read(folder)
    assert sorted(content.files) == manifest.names_below(folder)
    assert list(content.problems(folder, content.files, digest_up_to=None)) == []
    assert {name.split("/")[1] for name in content.files if "ocdbt.process" in name} == {"ocdbt.process_0", "ocdbt.process_1"}
    assert assets.read(str(folder)) == assets.read(str(tmp_path / "run")) == {"0": "an asset"}


@pytest.mark.slow("starts the processes of several hosts")
def test_models_are_saved_by_two_hosts_beside_their_checkpoints(tmp_path):
    given = arguments(tmp_path, checkpoint={"save_steps": 3, "model_every_steps": 1, "model_limit": 2})
    for host in harness.run(given, tmp_path / "logs", hosts=2, devices_per_host=1):
        assert [event["step"] for event in host.of("saved")] == [3, 6]
        assert host.of("note") == []
    assert layout.steps(place_of(tmp_path / "run" / "models")) == [5, 6]
    for step in (5, 6):
        folder = place_of(saved(tmp_path / "run", step, "models"))
        content = manifest.read(folder)
        assert list(content.problems(folder, content.files, digest_up_to=None)) == []
        assert {name.split("/")[1] for name in content.files if "ocdbt.process" in name} == {"ocdbt.process_0", "ocdbt.process_1"}


def go_on(trained, tmp_path, **changes):
    """Another step of a copy of the run; the events with which both hosts told what they restored."""
    shutil.copytree(trained / "run", tmp_path / "run", dirs_exist_ok=True)
    hosts = harness.run(arguments(tmp_path, max_num_steps=7, **changes), tmp_path / "logs", hosts=2, devices_per_host=1)
    return [host.of("restored")[0] for host in hosts]


@pytest.mark.slow("starts the processes of several hosts")
def test_all_files_of_both_hosts_are_in_the_manifest(trained):
    for step in (3, 6):
        folder = place_of(saved(trained / "run", step))
        content = manifest.read(folder)
        assert sorted(content.files) == manifest.names_below(folder)
        assert list(content.problems(folder, content.files, digest_up_to=None)) == []
        assert {name.split("/")[1] for name in content.files if "ocdbt.process" in name} == {"ocdbt.process_0", "ocdbt.process_1"}


@pytest.mark.slow("starts the processes of several hosts")
def test_damage_that_one_host_finds_makes_both_take_the_older(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    damaged = saved(tmp_path / "run", 6)
    (damaged / manifest.names_below(place_of(damaged))[1::2][-1]).unlink()  # of the files that host 1 looks at
    for event in go_on(tmp_path, tmp_path / "again"):
        assert event["step"] == 3
        assert [bad["step"] for bad in event["skipped"]] == [6]
        assert event["skipped"][0]["why"].startswith("host 1: ")
        assert event["skipped"][0]["why"].endswith("is missing")


@pytest.mark.slow("starts hosts twice")
def test_arrays_that_one_host_cannot_read_make_both_take_the_older(trained, tmp_path):
    for event in go_on(trained, tmp_path, task=f"{HERE}:UnreadableOnHost1"):
        assert event["step"] == 3
        assert event["skipped"] == [{"step": 6, "why": "host 1: OSError: [Errno 5] Input/output error"}]


def test_a_save_that_fails_on_one_host_has_failed_on_both_and_is_made_good(tmp_path):
    given = arguments(tmp_path, task=f"{HERE}:UnwritableOnceOnHost1")
    for host in harness.run(given, tmp_path / "logs", hosts=2, devices_per_host=1):
        assert [event["step"] for event in host.of("save_failed")] == [3]
        assert host.of("save_failed")[0]["error"] == "host 1: OSError: [Errno 5] Input/output error"
        assert host.of("saved")[-1]["step"] == 6
    assert layout.unfinished(place_of(tmp_path / "run" / "checkpoints")) == []


@pytest.mark.slow("starts hosts twice")
def test_storage_that_is_not_there_is_no_beginning_on_any_host(trained, tmp_path):
    """The folder of the checkpoints is gone on all hosts, or only one of them sees one checkpoint."""
    shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "away")
    gone = failure(start(tmp_path, "first", committed_step=6))
    lost = f"host 0: checkpoint 6 of this run was committed, and is not in {tmp_path}/run/checkpoints: there is no such folder"
    assert gone["message"].partition(";")[0] == lost
    assert not (tmp_path / "run" / "checkpoints").exists()
    (tmp_path / "away").rename(tmp_path / "run" / "checkpoints")
    half = failure(start(tmp_path, "second", task=f"{HERE}:UnmountedOnHost1"))
    assert half["message"].partition(",")[0] == f"host 1: {tmp_path}/run/checkpoints-empty/6 is not visible on this host"
    assert {(event["kind"], event["deterministic"]) for event in (gone, half)} == {("storage", False)}


def start(tmp_path, logs, task=f"{HERE}:ShardedTableTask", **orders):
    return harness.start(arguments(tmp_path, task=task, max_num_steps=7), tmp_path / logs, hosts=2, devices_per_host=1, **orders)


def failure(hosts):
    """The exception that host 0 ended with. The other one had the same, or found host 0 gone before it had heard of it: then it
    may say so, or be aborted by the runtime."""
    first = hosts[0].wait_for("exception")
    assert all(host.child.wait_gone(PATIENCE_S) for host in hosts)
    with hosts[1].changed:
        hosts[1].changed.wait_for(lambda: hosts[1].exit is not None, PATIENCE_S)
    if told := hosts[1].of("exception"):
        assert told[0]["kind"] in (first["kind"], "collateral")
    else:
        assert hosts[1].exit.signal == signal.SIGABRT
    return first


def input_output_error(*_):
    raise OSError(5, "Input/output error")


class SavesAndLoads(BaseTrainer):
    def build_model_assets(self):
        return ["an asset"]

    def train(self, *given):
        import numpy as np

        from trainers import runtime

        state = super().train(*given)
        loaded = self.load_pretrained(self.save_pretrained(f"{self.arguments.storage}/saved"))
        same = jax.tree.map(
            lambda a, b: all(
                np.array_equal(x.data, y.data) for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
            ),
            state,
            loaded,
        )
        runtime.current().note("the same bits" if all(jax.tree.leaves(same)) else f"other bits: {same}")
        return state


class ShardedTableTask(TableTask):
    """Each host has one half of the parameters."""

    def build_model(self, rngs):
        model = super().build_model(rngs)
        model.embed = nnx.Param(model.embed[...], logical_axes=(None, "embed"))
        model.out = nnx.Param(model.out[...], logical_axes=("embed", None))
        return model


class UnmountedOnHost1(ShardedTableTask):
    """Another disk lies where the others have the run's storage."""

    def __init__(self, arguments):
        import jax

        from trainers.checkpoint import manager

        super().__init__(arguments)
        real = manager.Ownership

        def unmounted(folder, *about):
            return real(folder.with_name(f"{folder.name}-empty") if jax.process_index() == 1 else folder, *about)

        manager.Ownership = unmounted


class UnreadableOnHost1(ShardedTableTask):
    """The arrays of step 6 cannot be read there."""

    def __init__(self, arguments):
        super().__init__(arguments)
        replace_once("read", lambda folder: folder.parent.name.startswith("6-"))


class UnwritableOnceOnHost1(ShardedTableTask):
    """The first save fails there."""

    def __init__(self, arguments):
        super().__init__(arguments)
        replace_once("write", lambda folder: True)


def replace_once(name, applies):
    """Makes the method `name` of ArrayFiles fail, on host 1, the first time that `applies` to its folder."""
    import jax

    from trainers.checkpoint.array_io import ArrayFiles

    real, failed = getattr(ArrayFiles, name), []

    def method(self, folder, *rest):
        if jax.process_index() == 1 and not failed and applies(folder):
            failed.append(folder)
            input_output_error()
        return real(self, folder, *rest)

    setattr(ArrayFiles, name, method)
