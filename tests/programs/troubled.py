"""Trainers with one fault each, on the hosts and batches named in the environment: for tests with several hosts.

TROUBLE is JSON, {"host": number, "batch": index}: where the fault strikes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np

from trainers.base import BaseTrainer
from trainers.callbacks import Callback


class Trouble(Callback):
    """Strikes on one host, whenever one batch comes."""

    def __init__(self, trainer: BaseTrainer):
        self.trainer, self.where = trainer, json.loads(os.environ["TROUBLE"])

    def on_step_begin(self, state, *, batch, **kwargs):
        if (jax.process_index(), state.batch_index) == (self.where["host"], self.where["batch"]):
            self.strike(state, batch)

    def strike(self, state: Any, batch: Any) -> None:
        raise NotImplementedError


class Poison(Trouble):
    """The rows of this host weigh NaN."""

    def strike(self, state, batch):
        weight = batch["weight"]
        shards = [jax.device_put(np.full(s.data.shape, np.nan, np.float32), s.device) for s in weight.addressable_shards]
        batch["weight"] = jax.make_array_from_single_device_arrays(weight.shape, weight.sharding, shards)


class DieOfRollback(Poison):
    """Poison, and the host is killed two batches after it went back."""

    def on_step_begin(self, state, *, batch, **kwargs):
        super().on_step_begin(state, batch=batch)
        if self.trainer.lineage.skipped and state.batch_index == self.where["batch"] - 2:
            os.kill(os.getpid(), signal.SIGKILL)


class Hang(Trouble):
    """The host waits for ever, in a library of Python's."""

    def strike(self, state, batch):
        threading.Event().wait()


class Mistake(Trouble):
    """A mistake of the user's."""

    def strike(self, state, batch):
        return {"rows": 1}["columns"]


class Crash(Trouble):
    """Native code that the user calls ends the process."""

    def strike(self, state, batch):
        ctypes.string_at(0)


class Slow(Trouble):
    """The host is slow from the batch on."""

    def on_step_begin(self, state, *, batch, **kwargs):
        if jax.process_index() == self.where["host"] and state.batch_index >= self.where["batch"]:
            time.sleep(0.2)


class SkipAStep(Trouble):
    """The host takes no part in the step, and believes that it did."""

    def strike(self, state, batch):
        state.global_step += 1


class Troubled(BaseTrainer):
    trouble: type[Trouble]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(self.trouble(self))


class Poisoned(Troubled):
    trouble = Poison


class DiesOfRollback(Troubled):
    trouble = DieOfRollback


class SkipsAStep(Troubled):
    trouble = SkipAStep


class Hangs(Troubled):
    trouble = Hang


class Mistaken(Troubled):
    trouble = Mistake


class Crashes(Troubled):
    trouble = Crash


class IsSlow(Troubled):
    trouble = Slow
