"""A user's program: it launches a mistake from a thread, and then a run that goes on until it is interrupted. `test_library.py`
copies it to a folder of its own."""

import threading
import time

import jax.numpy as jnp
import numpy as np
from flax import nnx

import gangway
from gangway.errors import UsageError
from trainers.callbacks import Callback
from trainers.library import Training


class Line(nnx.Module):
    def __init__(self):
        self.slope = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return self.slope * x


def squared_error(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def mistaken(model, batch):
    return model(batch["nothing"])


class Slow:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.01)
        return {"x": np.float32(index / 64), "y": np.float32(index / 32)}


def points():
    return Slow()


class Told(Callback):
    def on_publish(self, state, *, step, **kwargs):
        with open("told.txt", "a") as file:
            file.write(f"{step} ")


def training(loss, name):
    settings = {"batch_size": 8, "publish_every_steps": 1, "checkpoint": {"save_steps": 5}, "callbacks": [Told]}
    return Training(Line, loss, points, steps=100_000, run_dir=f"runs/{name}", **settings)


def refused():
    try:
        gangway.launch(training(mistaken, "mistaken"), hosts=2)
    except UsageError as error:
        print("refused:", error)


if __name__ == "__main__":
    thread = threading.Thread(target=refused)
    thread.start()
    thread.join()
    result = gangway.launch(training(squared_error, "slow"), hosts=1, tracking={"mlflow": False})
    print(result, "slope", float(result.model.slope[...]), "of step", int(result.state.step), "history", len(result.history))
