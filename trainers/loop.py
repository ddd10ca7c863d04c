"""The training loop: reads straight down; where order matters, the line says what would break.

The host never waits for the step it has just dispatched. It waits for the step before last: that bounds how far it runs ahead,
and tells it what all hosts agreed on by then.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from trainers import mesh as meshes
from trainers import runtime
from trainers.arguments import CheckpointConfig, EvaluationConfig
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.data.loader import StepAddressedLoader
from trainers.metrics import Publisher, Seconds
from trainers.protocol import StopReason
from trainers.state import TrainState
from trainers.step import Bag

RUN_AHEAD_STEPS = 2
STOP_REASONS = tuple(StopReason)
"""A stop wish travels as 1 + its place in this tuple; where hosts differ, the greatest wins."""


@dataclass(frozen=True)
class Agreed:
    """What all hosts knew at some earlier step: the same on every host at the same step."""

    stop: int = 0
    saves: int = 0


class Flags:
    """This host's wishes, as an input of the train step: one row for each of its devices, made anew only when a wish changes."""

    def __init__(self, mesh: jax.sharding.Mesh):
        self._sharding = meshes.one_per_device(mesh)
        self._num_devices = mesh.devices.size
        self._values: tuple[int, int] | None = None
        self._array: jax.Array | None = None

    def array(self, stop: int = 0, saves: int = 0) -> jax.Array:
        if self._array is None or self._values != (stop, saves):
            row = np.array([[stop, saves]], np.int32)
            shape = (self._num_devices, 2)
            self._array = jax.make_array_from_callback(shape, self._sharding, lambda index: np.broadcast_to(row, shape)[index])
            self._values = (stop, saves)
        return self._array


class Window:
    """The steps in flight. `push` adds one and waits for the step before last, whose flags it returns."""

    def __init__(self, first_step: int):
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        self.completed_step = first_step

    def push(self, reduced_flags: jax.Array) -> Agreed | None:
        self._in_flight.append(reduced_flags)
        return self._complete_one() if len(self._in_flight) > RUN_AHEAD_STEPS else None

    def drain(self) -> None:
        while self._in_flight:
            self._complete_one()

    def _complete_one(self) -> Agreed:
        stop, saves = (int(value) for value in np.asarray(self._in_flight.popleft()))
        self.completed_step += 1
        return Agreed(stop, saves)


@dataclass(frozen=True)
class Limits:
    max_steps: int | None
    max_batches: int | None
    deadline_s: float | None = None
    """On this host's clock: becomes a wish, never a decision of its own."""

    def reached(self, info: RunInfo) -> StopReason | None:
        if self.max_steps is not None and info.global_step >= self.max_steps:
            return StopReason.MAX_STEPS
        if self.max_batches is not None and info.batch_index >= self.max_batches:
            return StopReason.MAX_EPOCHS
        return None


@dataclass
class Wishes:
    """Turns what this host alone knows (signals, orders, its clock) into flags."""

    limits: Limits
    save_minutes: float | None
    clock: Callable[[], float] = time.monotonic
    saves: int = 0
    _seen_requests: int = 0
    _last_save_s: float = field(default=0.0)

    def __post_init__(self):
        self._last_save_s = self.clock()

    def stop(self) -> int:
        reason = runtime.current().stop_reason
        if reason is None and self.limits.deadline_s is not None and self.clock() >= self.limits.deadline_s:
            reason = StopReason.TIME_LIMIT
        return 0 if reason is None else 1 + STOP_REASONS.index(StopReason(reason))

    def wished_saves(self, agreed: Agreed) -> int:
        """How many saves this host has ever asked for; a new wish is one more than any host's."""
        requests = runtime.current().save_requests
        due = self.save_minutes is not None and self.clock() - self._last_save_s >= 60 * self.save_minutes
        if requests > self._seen_requests or due:
            self._seen_requests, self._last_save_s = requests, self.clock()
            self.saves = max(self.saves, agreed.saves) + 1
        return self.saves

    def saved(self) -> None:
        self._last_save_s = self.clock()


@dataclass
class Loop:
    """What one run of the loop works with."""

    train_step: Callable[[TrainState, Bag, Any, jax.Array], tuple[TrainState, Bag, jax.Array]]
    loader: StepAddressedLoader
    empty_bag: Callable[[], Bag]
    publisher: Publisher
    flags: Flags
    wishes: Wishes
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    save: Callable[[TrainState], None]
    """Starts a checkpoint of what the state says is its step."""
    evaluate: Callable[[TrainState], None]
    callbacks: CallbackList
    seconds: Seconds
    info: RunInfo
    samples_per_epoch: int
    resumed_step: int

    def run(self, state: TrainState) -> tuple[TrainState, StopReason]:
        """From `state` to a limit or a stop that all hosts agreed on. `state` is donated: use what is returned."""
        info, host = self.info, runtime.current()
        window, agreed, handled_saves = Window(info.global_step), Agreed(), 0
        bag = self.empty_bag()
        self.publisher.start(info.global_step)
        while (reason := self.wishes.limits.reached(info) or stop_reason(agreed)) is None:
            if self.save_due(info.global_step) or agreed.saves > handled_saves:
                handled_saves = max(agreed.saves, handled_saves)
                # Before the data moves on: a checkpoint must not know of a batch that its state has not seen.
                self._save(state)
            with self.seconds.measure("data_wait"):
                batch = self.loader.batch(info.batch_index)
            self.callbacks.call(Callback.on_step_begin, info, batch=batch)
            wishes = self.flags.array(self.wishes.stop(), self.wishes.wished_saves(agreed))
            state, bag, reduced = self.train_step(state, bag, batch, wishes)
            info.global_step += 1
            info.batch_index += 1
            info.epoch = info.batch_index * self.loader.global_batch_size / self.samples_per_epoch
            if info.global_step == self.resumed_step + 1:
                jax.block_until_ready(reduced)  # the only wait for the newest step: recovery is measured to here
                host.emit("first_step", step=info.global_step, resumed_step=self.resumed_step)
            agreed = window.push(reduced) or agreed
            host.step, host.batch_index = window.completed_step, info.batch_index
            self.publisher.collect(window.completed_step)
            self.callbacks.call(Callback.on_step_end, info)
            if self.publisher.due(info.global_step):
                self.publisher.cut(info.global_step, bag, self.seconds.take())
                bag = self.empty_bag()
            if self.evaluation_due(info.global_step):
                self._finish_steps(window, bag)
                bag = self.empty_bag()
                self._evaluate(state)
        self._finish_steps(window, bag)
        return state, reason

    def save_due(self, step: int) -> bool:
        every = self.checkpoint.save_steps
        return every is not None and step % every == 0 and step > self.resumed_step

    def evaluation_due(self, step: int) -> bool:
        every = self.evaluation.every_steps
        return every is not None and step % every == 0

    def _save(self, state: TrainState) -> None:
        jax.block_until_ready(state)  # copying waits for the steps in flight anyway: their time is theirs
        with self.seconds.measure("checkpoint"):
            self.save(state)
        self.wishes.saved()

    def _evaluate(self, state: TrainState) -> None:
        host = runtime.current()
        host.phase("evaluate")
        with self.seconds.measure("evaluation"):
            self.evaluate(state)
        host.phase("train")

    def _finish_steps(self, window: Window, bag: Bag) -> None:
        """Waits for the steps in flight and publishes what is known of them."""
        window.drain()
        self.publisher.flush(window.completed_step, bag, self.seconds.take())
        runtime.current().step = window.completed_step


def stop_reason(agreed: Agreed) -> StopReason | None:
    return STOP_REASONS[agreed.stop - 1] if agreed.stop else None
