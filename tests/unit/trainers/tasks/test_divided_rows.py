"""Tasks other than a language model, where the devices share rows, layers or slices: the numbers of one device."""

from __future__ import annotations

import numpy as np
import pytest

from tests.programs.small_tokens import datasets
from tests.unit import training
from tests.unit.trainers.tasks.test_distillation import RUN
from tests.unit.trainers.tasks.test_packed_examples_loss import CLASSES, MODEL, PREFERENCE, REWARD, SGD, arguments, home
from tests.unit.trainers.tasks.test_preference import QWEN
from tests.unit.training import OneDevice, losses, of
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config.arguments import dataset_function
from trainers.tasks import distillation

__all__ = ["home"]
MESHES = {
    "both": {"data": 2, "pipeline": 2, "context": 2},
    "slices": {"slice": 2, "data": 1, "context": 2, "tensor": 2},
}
STEPS = 3


def trained(folder, events, task, packing, cls=BaseTrainer, **changes):
    events.clear()
    runtime.install(runtime.Runtime(events.append))
    about = {"model": {**MODEL, "num_layers": 2}, "max_num_steps": STEPS, "publish_every_steps": 1, "optimizer": SGD}
    about |= {"global_batch_size": 8, "checkpoint": {"save_at_end": False}}
    made = arguments(folder, task, packing, **{**about, **changes})
    cls(made, *dataset_function(made)(made)).train()
    told = [event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"]]
    return list(losses(events).values()), [each["accuracy"] for each in told]


@pytest.mark.slow("trains each task on one device and on meshes")
@pytest.mark.parametrize(
    ("task", "packing", "changes"),
    [
        (PREFERENCE, "fit", {"preference": {"loss": "simpo"}}),
        (REWARD, None, {}),
        (REWARD, "fit", {}),
        (CLASSES, "fit", {"data": {"sequence_length": 16}}),
    ],
    ids=["preference", "reward", "reward-packed", "classes"],
)
def test_three_steps_have_the_numbers_of_one_device(tmp_path, events, task, packing, changes):
    expected = trained(tmp_path / "one", events, task, packing, OneDevice, **changes)
    assert len(expected[0]) == STEPS
    for name, mesh in MESHES.items():
        found = trained(tmp_path / name, events, task, packing, mesh=mesh, **changes)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, err_msg=name)
        assert found[1] == pytest.approx(expected[1], rel=1e-5), name


@pytest.mark.slow("trains on one device and on meshes")
def test_a_student_has_the_numbers_of_one_device(tmp_path, events, monkeypatch):
    monkeypatch.setattr(distillation, "MAX_LOGITS", 64)
    about = {**RUN, "frozen": {"teacher": QWEN}, "max_num_steps": STEPS, "optimizer": SGD}
    found = {}
    for name, mesh in {"one": {}, **MESHES}.items():
        events.clear()
        made = training.arguments(tmp_path / name, **about, mesh=mesh)
        (OneDevice if name == "one" else BaseTrainer)(made, datasets(made)[0]).train()
        found[name] = list(losses(events).values())
        np.testing.assert_allclose(found[name], found["one"], rtol=1e-5, err_msg=name)
    assert len(found["one"]) == STEPS
