"""Preferences on two hosts: the same losses as on one with the same devices, with a reference that neither has alone."""

from __future__ import annotations

import pytest

from tests.multihost import harness
from tests.multihost.test_lora import BASE, settings
from tests.programs import short_pairs

WINGS = ("trainers/tasks", "trainers/data")

CHANGES = {
    "task": "trainers.tasks.preference:PreferenceTask",
    "data": {"sequence_length": 8, "dataset": "tests.programs.preferences:datasets"},
    "lora": None,
    "frozen": {"reference": BASE},
    "max_num_steps": 3,
}


def assert_two_hosts_have_the_losses_of_one(tmp_path, changes):
    losses = {}
    for hosts in (1, 2):
        given = settings(tmp_path / str(hosts), **changes)
        ran = harness.run(given, tmp_path / f"logs-{hosts}", hosts=hosts, devices_per_host=2 // hosts)
        losses[hosts] = harness.losses(ran[0])
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)
    assert len({*losses[1].values()}) == 3


@pytest.mark.slow("starts the processes of several hosts")
def test_two_hosts_have_the_losses_of_one(tmp_path):
    assert_two_hosts_have_the_losses_of_one(tmp_path, CHANGES)


@pytest.mark.slow("starts the processes of several hosts")
def test_rows_of_several_pairs_give_two_hosts_the_losses_of_one(tmp_path):
    path = short_pairs.write(tmp_path / "pairs.jsonl", short_pairs.pairs(60, 0))
    data = {"paths": [path], "sequence_length": 40, "packing": "fit", "eval_fraction": 0.0}
    model = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}
    changes = {**CHANGES, "frozen": {}, "preference": {"loss": "simpo"}, "data": data, "model": model}
    assert_two_hosts_have_the_losses_of_one(tmp_path, changes)
