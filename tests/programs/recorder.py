"""Trainers for tests of whole jobs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from trainers import runtime
from trainers.base import BaseTrainer
from trainers.protocol import StopReason, TrainerOutput
from trainers.runtime import multihost

SHOWN = (
    "TPU_NAME",
    "TPU_WORKER_ID",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    "MEGASCALE_PORT",
)


class Recorder(BaseTrainer):
    """Leaves a note of where it ran beside the run."""

    def train(self, model_parameters=None, state=None):
        import jax

        seen = {name: os.environ.get(name) for name in SHOWN}
        path = Path(self.arguments.storage) / f"process-{jax.process_index()}.json"
        path.write_text(json.dumps(seen))
        return super().train(model_parameters, state)


class OwnTrainer:
    """Inherits nothing, knows no JAX: counts, tells its progress, saves a number, and goes on from it. Its first life crashes."""

    def __init__(self, arguments, dataset_train, dataset_eval):
        self.arguments, self.output = arguments, None

    def train(self, model_parameters=None, state=None):
        folder = Path(self.arguments.storage) / "own"
        folder.mkdir(exist_ok=True)
        came_from = runtime.restore_from()
        step = int(Path(came_from).read_text()) if came_from else 0
        while step < self.arguments.max_num_steps and not runtime.stop_requested():
            step += 1
            runtime.progress(step, {"loss": 1.0 / step})
            if step == 4:
                (folder / "4").write_text("4")
                if multihost.from_host0("am I host 0?", None) is None:
                    runtime.saved(4, str(folder / "4"))
                time.sleep(0.5)  # for the news to get out
                if came_from is None:
                    raise RuntimeError("the first life ends here")
        (folder / "log").open("a").write(f"{came_from}\n")
        metrics = {"steps": step}
        self.output = TrainerOutput(None, None, str(folder / "4"), "4", StopReason.MAX_STEPS, metrics)
        return SimpleNamespace(step=step)

    def evaluate(self, state, metric_calculator=None):
        return {}

    def eval(self, state):
        yield {}

    def save_pretrained(self, ckpt_path, state=None):
        return ckpt_path

    def configure_model(self): ...

    def configure_dataloaders(self): ...

    def configure_functions(self): ...


class Stubborn(BaseTrainer):
    """Fails at every start in the same way."""

    def train(self, model_parameters=None, state=None):
        raise KeyError("a mistake of the user")
