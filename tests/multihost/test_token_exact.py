"""Every target counts the same on any number of hosts: against one big batch, computed without the trainer."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.multihost import harness
from tests.programs import ragged
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.step.state import initial_parameters

WINGS = ("trainers/step", "trainers/tasks")

TASK = "Terms"


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.slow("starts the processes of several hosts")
def test_losses_and_gradients_are_those_of_one_big_batch(tmp_path, hosts):
    """Ragged targets, in two micro-batches whose 18 rows four devices cannot share evenly. What a step has made of its gradients
    shows in the losses of those that follow."""
    settings = {**ragged.SETTINGS, "task": f"tests.programs.ragged:{TASK}", "accumulation_steps": 2}
    arguments = from_dict(TrainingArguments, {"name": "run", "storage": str(tmp_path), **settings})
    made = harness.run(arguments, tmp_path / "logs", hosts=hosts, devices_per_host=4 // hosts)
    params = jax.jit(lambda: initial_parameters(getattr(ragged, TASK)(arguments), arguments.seed))()
    losses, norms, _ = ragged.direct_run(TASK, params, 36, 3)
    metrics = [event["metrics"] for event in made[0].of("metrics")]
    np.testing.assert_allclose([m["loss"] for m in metrics if "loss" in m], losses, rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics if "grad_norm" in m], norms, rtol=1e-4)
    assert len({harness.result(host)["params_digest"] for host in made}) == 1
