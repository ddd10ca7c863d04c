"""A trainer that inherits nothing: the orchestrator runs, watches and restarts it like any other."""

import json
from pathlib import Path

import jax
import numpy as np

from trainers import protocol, runtime
from trainers.runtime import multihost


def points(arguments):
    rows = np.float32(np.random.default_rng(arguments.seed).normal(size=(320, 1)) @ [[1, 3]] + [[0, -1]])
    return rows[:256], rows[256:]  # (training data, held-out data)


def loss(line, rows):
    return jax.numpy.mean((line["slope"] * rows[:, 0] + line["offset"] - rows[:, 1]) ** 2)


class LineTrainer:
    def __init__(self, arguments, dataset_train, dataset_eval):
        self.arguments, self.dataset_train, self.dataset_eval, self.output = arguments, dataset_train, dataset_eval, None

    def train(self, model_parameters=None, state=None):
        path, fresh = runtime.restore_from(), (model_parameters or {"slope": 0.0, "offset": 0.0}, 0)
        line, step = json.loads(Path(path).read_text()) if path else fresh
        train_step, mesh = jax.jit(jax.value_and_grad(loss)), jax.make_mesh((jax.device_count(),), ("data",))
        place, stop = jax.NamedSharding(mesh, jax.P("data")), False
        # A signal may come to one host alone: all must hear of it before one of them stops.
        while step < self.arguments.max_num_steps and not (stop := any(multihost.all_hosts("stop", runtime.stop_requested()))):
            rows = self.dataset_train[(step * 8 + np.arange(8)) % 256]
            value, gradients = train_step(line, jax.make_array_from_callback(rows.shape, place, rows.__getitem__))
            line, step = {name: float(line[name] - 0.1 * gradients[name]) for name in line}, step + 1
            runtime.progress(step, {"loss": float(value)})
            if step % self.arguments.checkpoint.save_steps == 0:
                path = self.save_pretrained(f"{self.arguments.storage}/{self.arguments.name}/{step}.json", (line, step))
        reason, metrics = "terminated" if stop else "max_steps", {"steps": step, **line, **self.evaluate((line, step))}
        self.output = protocol.TrainerOutput((line, step), mesh, path, None, protocol.StopReason(reason), metrics)
        return line, step

    def evaluate(self, state, metric_calculator=None):
        return {"eval_loss": float(loss(state[0], self.dataset_eval))}

    def eval(self, model_state):
        yield self.evaluate(model_state)

    def save_pretrained(self, ckpt_path, state=None):
        if jax.process_index() == 0:
            Path(ckpt_path).write_text(json.dumps(state))
            runtime.saved(state[1], ckpt_path)
        return ckpt_path

    def configure_model(self): ...

    def configure_dataloaders(self): ...

    def configure_functions(self): ...
