"""A small trainer to try, what it told, and what may be done to it."""

from __future__ import annotations

import jax
import numpy as np

from tests.programs.tiny import numbers
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.trainer.placement import Placement

FIXED = {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "cosine", "decay_steps": 12}}


def arguments(tmp_path, **changes):
    base = {
        "name": "run",
        "storage": str(tmp_path),
        "task": "tests.programs.tiny:TableTask",
        "global_batch_size": 16,
        "max_num_steps": 12,
        "publish_every_steps": 1,
        "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "checkpoint": {"save_steps": 4},
    }
    return from_dict(TrainingArguments, {**base, **changes})


def trainer(tmp_path, *callbacks, cls=BaseTrainer, **changes):
    made = arguments(tmp_path, **changes)
    return cls(made, *numbers(made), callbacks=callbacks)


def of(events, kind):
    return [event for event in events if event["ev"] == kind]


def losses(events):
    return {e["step"]: e["metrics"]["loss"] for e in of(events, "metrics") if "loss" in e["metrics"]}


def assert_equal(a, b):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


class OneDevice(BaseTrainer):
    def __init__(self, *args, **kwargs):
        from trainers.parallel.mesh import make_mesh

        super().__init__(*args, **kwargs)
        self.placement = Placement(self.arguments, self.design, make_mesh(self.arguments.mesh, jax.devices()[:1]))


class StopAt(Callback):
    def __init__(self, step, reason):
        self.step, self.reason = step, reason

    def on_step_end(self, state, **kwargs):
        if state.global_step == self.step:
            runtime.current().request_stop(self.reason)


def flip_a_byte(folder):
    """In the middle of the largest data file: Orbax itself does not notice."""
    path = max((p for p in folder.rglob("*") if p.parent.name == "d"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
