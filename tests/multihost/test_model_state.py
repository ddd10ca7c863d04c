"""Batch statistics and dropout on several hosts: killed, resized from two hosts to one and back, and replayed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multihost import harness
from tests.multihost.resizing import killed_and_resized, resized
from tests.programs import normed
from trainers.config.arguments import TrainingArguments, from_dict

WINGS = ("trainers/step", "trainers/checkpoint")

STEPS = 9
CUT_AT = (3, 6)


def arguments(tmp_path, **changes):
    about = {"max_num_steps": STEPS, "checkpoint": {"save_steps": 2}, "accumulation_steps": 3, **changes}
    return from_dict(TrainingArguments, {**normed.settings(**about), "storage": str(tmp_path)})


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """One host is killed at batch 2, after the checkpoint of step 2 began or before it."""
    folder = tmp_path_factory.mktemp("killed")
    return killed_and_resized(arguments(folder), folder, CUT_AT)


@pytest.mark.slow("starts the processes of several hosts")
def test_a_run_that_was_killed_and_resized_equals_the_replay_of_its_lineage(killed, tmp_path):
    result = harness.result(killed[0])
    assert [(part["batch_index"], part["num_hosts"]) for part in result["lineage"]] == [(0, 2), (3, 1), (6, 2)]
    again = harness.result(resized(arguments(tmp_path, checkpoint={}), tmp_path, CUT_AT)[0])
    # The digest of the parameters has the batch statistics, too.
    assert again["params_digest"] == result["params_digest"] == harness.result(killed[1])["params_digest"]
    assert again["samples_digest"] == result["samples_digest"]
    assert again["eval_loss"] == result["eval_loss"]


@pytest.mark.slow("starts the processes of several hosts")
def test_its_losses_and_samples_are_those_of_one_device(killed, tmp_path):
    """The same noise, and statistics of the same rows: on four devices nine rows of a micro-batch are filled up to twelve."""
    (one,) = harness.run(arguments(tmp_path), tmp_path / "logs", hosts=1, devices_per_host=1)
    expected, got = harness.losses(one), harness.losses(killed[0])
    assert list(got) == [7, 8, 9]
    np.testing.assert_allclose(list(got.values()), [expected[step] for step in got], rtol=1e-4)
    assert harness.result(killed[0])["samples_digest"] == harness.result(one)["samples_digest"]
    assert harness.result(killed[0])["samples"] == harness.result(one)["samples"] == 27 * STEPS
    assert harness.result(killed[0])["eval_loss"] == pytest.approx(harness.result(one)["eval_loss"], rel=1e-3)
