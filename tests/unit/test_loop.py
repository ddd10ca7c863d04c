"""The loop: what it waits for, and when; wishes that become decisions; the order of saving and reading."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from trainers import runtime
from trainers.arguments import CheckpointConfig, EvaluationConfig
from trainers.callbacks import CallbackList, RunInfo
from trainers.loop import STOP_REASONS, Agreed, Limits, Loop, Window, Wishes
from trainers.metrics import Publisher, Seconds, Throughput
from trainers.protocol import StopReason

NAMES = ("loss", "grad_norm", "learning_rate", "non_finite")


class OnDevice:
    """An array that notes when the host waited for it or fetched it."""

    def __init__(self, world, kind, step, values):
        self.world, self.kind, self.step, self.values = world, kind, step, np.asarray(values)

    def _touched(self, how):
        self.world.touched.append((how, self.kind, self.step, self.world.dispatched))

    def __array__(self, dtype=None, copy=None):
        self._touched("fetch")
        return self.values

    def block_until_ready(self):
        self._touched("wait")
        return self

    def copy_to_host_async(self): ...


class World:
    """A loop around a step that only counts, and a record of all that happens, in order."""

    def __init__(self, max_steps=40, every_steps=10, save_steps=None, wishes=None):
        self.touched, self.log, self.dispatched, self.asked = [], [], 0, []
        runtime.install(runtime.Runtime(lambda event: self.log.append((event["ev"], event.get("step")))))
        self.info = RunInfo()
        limits = Limits(max_steps, None)
        self.loop = Loop(
            train_step=self.step,
            loader=SimpleNamespace(batch=self.batch, global_batch_size=1),
            empty_bag=lambda: None,
            publisher=Publisher(every_steps, Throughput(1, 1.0, 1), NAMES, self.publish, clock=lambda: 0.0),
            flags=SimpleNamespace(array=lambda stop, saves: (stop, saves)),
            wishes=wishes(limits) if wishes else Wishes(limits, None, clock=lambda: 0.0),
            checkpoint=CheckpointConfig(save_steps=save_steps),
            evaluation=EvaluationConfig(),
            save=lambda state: self.log.append(("save", state)),
            evaluate=lambda state: None,
            callbacks=CallbackList(),
            seconds=Seconds(),
            info=self.info,
            samples_per_epoch=10,
            resumed_step=0,
        )

    def batch(self, k):
        self.log.append(("batch", k))
        return k

    def step(self, state, bag, batch, wishes):
        self.dispatched += 1
        self.asked.append(wishes)
        made = OnDevice(self, "bag", self.dispatched, [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
        return state + 1, made, OnDevice(self, "flags", self.dispatched, wishes)

    def publish(self, step, metrics, seconds):
        self.log.append(("publish", step))


@pytest.fixture(autouse=True)
def _own_runtime():
    before = runtime.current()
    yield
    runtime.install(before)


def test_the_host_never_waits_for_a_step_that_is_not_two_behind():
    world = World(max_steps=40, every_steps=10)
    assert world.loop.run(0) == (40, StopReason.MAX_STEPS)
    assert world.touched[0] == ("wait", "flags", 1, 1)  # the first step alone: recovery is measured to its end
    between = [touch for touch in world.touched[1:] if touch[3] < 40]
    assert {kind for _, kind, _, _ in between} == {"flags", "bag"}
    assert all(how == "fetch" and dispatched - step >= 2 for how, _, step, dispatched in between)
    bags = [step for _, kind, step, _ in world.touched if kind == "bag"]
    assert bags == [10, 20, 30, 40]  # only what is published is ever fetched
    assert [step for kind, step in world.log if kind == "publish"] == [10, 20, 30, 40]


def test_what_is_not_due_yet_at_the_end_is_published_all_the_same():
    world = World(max_steps=13, every_steps=10)
    world.loop.run(0)
    assert [step for kind, step in world.log if kind == "publish"] == [10, 13]


def test_a_save_comes_before_the_next_batch_is_drawn():
    world = World(max_steps=6, save_steps=2)
    world.loop.run(0)
    order = [entry for entry in world.log if entry[0] in ("save", "batch")]
    assert order == [("batch", 0), ("batch", 1), ("save", 2), ("batch", 2), ("batch", 3), ("save", 4), ("batch", 4), ("batch", 5)]


def test_a_stop_wish_travels_through_the_step_and_stops_two_steps_later():
    world = World(max_steps=None)
    stop_at = 5

    def batch(k):
        if k == stop_at:
            runtime.current().request_stop("terminated")
        return k

    world.loop.loader.batch = batch
    state, reason = world.loop.run(0)
    assert reason is StopReason.TERMINATED
    assert world.asked[stop_at][0] == 1 + STOP_REASONS.index(StopReason.TERMINATED)
    assert state == stop_at + 1 + 2


def test_each_save_wish_is_granted_once():
    world = World(max_steps=30)

    def batch(k):
        if k in (5, 15):
            runtime.current().request_save()
        return k

    world.loop.loader.batch = batch
    world.loop.run(0)
    assert [state for kind, state in world.log if kind == "save"] == [8, 18]


def test_a_wish_is_one_more_than_any_host_had():
    wishes = Wishes(Limits(None, None), None, clock=lambda: 0.0)
    runtime.install(runtime.Runtime(lambda event: None))
    assert wishes.wished_saves(Agreed(saves=3)) == 0
    runtime.current().request_save()
    assert wishes.wished_saves(Agreed(saves=3)) == 4
    assert wishes.wished_saves(Agreed(saves=4)) == 4


def test_minutes_and_limits_are_wishes_by_this_hosts_clock():
    now = [0.0]
    wishes = Wishes(Limits(None, None, deadline_s=100.0), save_minutes=1.0, clock=lambda: now[0])
    assert (wishes.stop(), wishes.wished_saves(Agreed())) == (0, 0)
    now[0] = 61.0
    assert wishes.wished_saves(Agreed()) == 1
    now[0] = 100.0
    assert STOP_REASONS[wishes.stop() - 1] is StopReason.TIME_LIMIT


def test_the_window_holds_two_steps():
    window = Window(10)
    assert window.push(np.array([0, 0])) is None
    assert window.push(np.array([0, 0])) is None
    assert window.push(np.array([0, 7])) == Agreed(0, 0)
    assert window.completed_step == 11
    window.drain()
    assert window.completed_step == 13
