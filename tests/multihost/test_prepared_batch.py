"""Batches that the trainer's hook changes on the devices, with the present state: on two hosts, killed and resumed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multihost import harness
from trainers.config.arguments import TrainingArguments, from_dict

WINGS = ("trainers/loop", "trainers/trainer")


def run(folder, *, hosts=2, start=harness.run, **how):
    settings = {
        "task": "tests.programs.distilling:Student",
        "trainer": "tests.programs.distilling:Rollouts",
        "global_batch_size": 16,
        "accumulation_steps": 2,
        "mesh": {"fsdp": 2},
        "max_num_steps": 40,
        "publish_every_steps": 1,
        "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"},
        "optimizer": {"learning_rate": 0.01, "schedule": {"name": "cosine", "decay_steps": 40}},
        "checkpoint": {"save_steps": 4},
    }
    made = from_dict(TrainingArguments, {"name": "run", "storage": str(folder), **settings})
    return start(made, folder / "logs", hosts=hosts, devices_per_host=2 // hosts, **how)


@pytest.mark.slow("starts the processes of several hosts")
def test_rollouts_on_two_hosts_are_those_of_one_and_the_same_after_a_kill(tmp_path):
    whole = run(tmp_path / "whole")
    (one,) = run(tmp_path / "one", hosts=1)
    np.testing.assert_allclose(list(harness.losses(whole[0]).values()), list(harness.losses(one).values()), rtol=5e-4)
    cut = run(tmp_path / "cut", start=harness.start)
    cut[0].wait_for("saved")
    harness.kill(cut)
    assert not cut[0].of("done")
    again = run(tmp_path / "cut")
    assert again[0].of("restored")[0]["step"] > 0
    for name in ("params_digest", "samples_digest"):
        assert len({harness.result(host)[name] for host in (*whole, *again)}) == 1, name
