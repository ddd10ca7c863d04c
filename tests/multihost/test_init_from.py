"""Two hosts that begin with the parameters of another run: each reads its part, and what is wrong both say."""

from __future__ import annotations

import shutil

import pytest

from gangway.storage.opening import place_of
from tests.multihost import harness
from tests.multihost.test_checkpoints import ShardedTableTask, arguments, failure
from tests.saved import saved
from trainers.checkpoint import manifest

WINGS = ("trainers/checkpoint", "trainers/loop")
HERE = "tests.multihost.test_init_from"
SCHEDULE = {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of another seed with one checkpoint, half of it by either host."""
    folder = tmp_path_factory.mktemp("source")
    harness.run(settings(folder, None, max_num_steps=3, seed=5), folder / "logs", hosts=2, devices_per_host=1)
    return folder / "run"


def settings(storage, init_from, **changes):
    base = {"optimizer": SCHEDULE, "checkpoint": {"save_steps": 4}, "publish_every_steps": 1, "max_num_steps": 6}
    return arguments(storage, **{**base, "init_from": init_from, **changes})


def trained(storage, init_from, **changes):
    return harness.run(settings(storage, init_from, **changes), storage / "logs", hosts=2, devices_per_host=1)


def digest(hosts):
    return harness.result(hosts[0])["params_digest"]


@pytest.mark.slow("starts hosts three times; one process shows the same in test_init_from.py of the loop")
def test_killed_before_and_after_its_first_checkpoint_it_ends_with_the_same_bits(source, tmp_path):
    whole = trained(tmp_path / "whole", str(source))
    notes = [[event["message"] for event in host.of("note") if "init_from" in event["message"]] for host in whole]
    assert [len(each) for each in notes] == [1, 0]
    slow = settings(tmp_path / "cut", str(source), task=f"{HERE}:WaitsAt", max_num_steps=6)
    for has_saved in (False, True):
        hosts = harness.start(
            slow, tmp_path / f"cut-{has_saved}", hosts=2, devices_per_host=1, env={"WAIT_AT": "5" if has_saved else "2"}
        )
        for host in hosts:
            host.wait_for("saved" if has_saved else "first_step")
        harness.kill(hosts)
        assert saved(tmp_path / "cut" / "run", 4).exists() == has_saved
    ended = trained(tmp_path / "cut", str(source))
    assert [event["step"] for event in ended[0].of("restored")] == [4]
    assert digest(ended) == digest(whole)
    meta = manifest.read_meta(place_of(saved(tmp_path / "cut" / "run", 6)))
    assert meta["init_from"]["checkpoint"] == str(saved(source, 3))


@pytest.mark.slow("starts the processes of two hosts")
def test_what_one_host_does_not_see_both_say(source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    changed = settings(tmp_path, str(copy), task=f"{HERE}:NotSeenByHost1")
    told = failure(harness.start(changed, tmp_path / "first", hosts=2, devices_per_host=1))
    assert told["message"] == f"init_from: host 1: there is no {copy}-away/checkpoints/{saved(copy, 3).name}"
    assert (told["kind"], told["deterministic"]) == ("storage", False)


def waiting():
    """The data of a batch does not come: so the test has time to kill the hosts."""
    import os
    import time

    from trainers.data.loader import StepAddressedLoader

    real = StepAddressedLoader.batch

    def batch(self, index):
        if index == int(os.environ["WAIT_AT"]):
            time.sleep(600)
        return real(self, index)

    StepAddressedLoader.batch = batch


class WaitsAt(ShardedTableTask):
    def __init__(self, arguments):
        super().__init__(arguments)
        waiting()


class NotSeenByHost1(ShardedTableTask):
    def __init__(self, arguments):
        import jax

        from trainers.checkpoint import weights

        super().__init__(arguments)
        real = weights.open_model

        def look(path, *more):
            from pathlib import Path

            return real(Path(str(path).replace("/copy/", "/copy-away/")) if jax.process_index() == 1 else path, *more)

        weights.open_model = look
