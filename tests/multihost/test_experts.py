"""A mixture of experts on several hosts: killed, resized from two hosts to one and back, and replayed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multihost import harness
from tests.multihost.resizing import killed_and_resized, resized
from trainers.config.arguments import TrainingArguments, from_dict

WINGS = ("trainers/models", "trainers/parallel")

STEPS = 6
CUT_AT = (3, 5)


def arguments(tmp_path, **changes):
    """Rows that the replicas cannot share evenly, and experts on the devices of all hosts."""
    about = {
        "name": "run",
        "storage": str(tmp_path),
        "global_batch_size": 12,
        "accumulation_steps": 2,
        "max_num_steps": STEPS,
        "publish_every_steps": 1,
        "model": {
            **{"family": "qwen3_moe", "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16},
            **{"num_experts": 4, "experts_per_token": 2},
        },
        "mesh": {"data": 1, "expert": -1},
        "loss": {"load_balancing_weight": 0.02, "router_z_loss_weight": 0.01},
        "data": {"sequence_length": 16, "paths": [__file__], "eval_fraction": 0.2},
        "optimizer": {"learning_rate": 0.01, "schedule": {"name": "constant"}},
        "checkpoint": {"save_steps": 2},
        "previews": {"prompts": ["def "], "num_tokens": 4},
        **changes,
    }
    return from_dict(TrainingArguments, about)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """One host is killed at batch 2."""
    folder = tmp_path_factory.mktemp("killed")
    return killed_and_resized(arguments(folder), folder, CUT_AT)


@pytest.mark.slow("starts the processes of several hosts")
def test_a_mixture_that_was_killed_and_resized_equals_the_replay_of_its_lineage(killed, tmp_path):
    result = harness.result(killed[0])
    lineage = [(part["batch_index"], part["num_hosts"], part["mesh"]["expert"]) for part in result["lineage"]]
    assert lineage == [(0, 2, 4), (3, 1, 2), (5, 2, 4)]
    again = harness.result(resized(arguments(tmp_path, checkpoint={}), tmp_path, CUT_AT)[0])
    assert again["params_digest"] == result["params_digest"] == harness.result(killed[1])["params_digest"]
    assert again["samples_digest"] == result["samples_digest"]
    assert again["eval_loss"] == result["eval_loss"]


@pytest.mark.slow("starts the processes of several hosts")
def test_its_losses_and_loads_are_those_of_one_device(killed, tmp_path):
    (one,) = harness.run(arguments(tmp_path), tmp_path / "logs", hosts=1, devices_per_host=1)
    for name in ("loss", "load_balancing_loss", "router_z_loss", "busiest_expert", "router_entropy", "perplexity"):
        expected, got = (
            {event["step"]: event["metrics"][name] for event in host.of("metrics") if name in event["metrics"]}
            for host in (one, killed[0])
        )
        assert list(got) == [6]
        np.testing.assert_allclose(list(got.values()), [expected[step] for step in got], rtol=1e-3, err_msg=name)
    assert harness.result(killed[0])["samples_digest"] == harness.result(one)["samples_digest"]
