"""The loop: what it waits for, and when; requests that become decisions; the order of saving and reading."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gangway.errors import DesyncError, LossSpikeError, NonFiniteLossError
from gangway.stop_reason import StopReason
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.callbacks.profiler import Profiler
from trainers.config import AnomalyConfig, CheckpointConfig, DistributionConfig, EvaluationConfig, PreviewConfig, ProfileConfig
from trainers.loop.agreement import RETRY_FIRST_S, RETRY_MAX_S, Agreement, HostRequests, Limits, Retry
from trainers.loop.guard import Guard
from trainers.loop.inflight import LOOK_AHEAD_STEPS, STOP_REASONS, Agreed, Window
from trainers.loop.lineage import Lineage
from trainers.loop.train_loop import Loop, Steps
from trainers.loop.triggers import Due, Epochs
from trainers.metrics.accumulator import Kind, Layout
from trainers.metrics.publisher import BusyTime, Publisher, Throughput
from trainers.step.host_flags import REDUCED, UpdateStatus
from trainers.step.train_step import STEP_METRICS, StepOutput
from trainers.worker import exception_event

LAYOUT = Layout(("loss", *STEP_METRICS), (Kind.MEAN, *STEP_METRICS.values()))


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


def reduced(stop=0, saves=0, status=UpdateStatus.APPLIED, wait=0, batch_index=0, newest=None, loss=1.0, expected=1.0):
    """What the step gives back to all hosts."""
    values = (stop, saves, status, wait, batch_index, batch_index if newest is None else newest, 0)
    assert len(values) + 2 == len(REDUCED)
    return np.array([*values, *np.array([loss, expected], np.float32).view(np.int32)], np.int32)


def due(evaluation=None, *, publish=(10, None), **checkpoint):
    return Due(CheckpointConfig(**checkpoint), evaluation or EvaluationConfig(), PreviewConfig(), Epochs(10, 1), *publish)


class Evaluations:
    """In place of an Evaluator. A state is the number of its step."""

    wants_stop = False

    def __init__(self, log):
        self.log, self.steps, self.evaluated_step = log, [], None

    def evaluate(self, state):
        self.log.append(("evaluate", state))
        self.steps.append(state)
        self.evaluated_step = state
        return state


class World:
    """A loop around a step that only counts, and a record of all that happens, in order.

    `statuses`: what the step says of a batch, the first time that it comes, unless it is told to skip it.
    """

    def __init__(self, max_steps=40, every_steps=10, save_steps=None, host_requests=None, anomalies=None, statuses=None, skip=()):
        self.touched, self.log, self.dispatched, self.asked = [], [], 0, []
        self.statuses = statuses or {}
        runtime.install(runtime.Runtime(lambda event: self.log.append((event["ev"], event.get("step")))))
        self.info = RunInfo()
        limits = Limits(max_steps, None)
        requests = host_requests(limits) if host_requests else HostRequests(limits, None, clock=lambda: 0.0)
        self.loop = Loop(
            info=self.info,
            steps=Steps(self.step, LAYOUT, lambda: None, DistributionConfig(every_steps=20)),
            loader=SimpleNamespace(batch=self.batch, global_batch_size=1),
            agreement=Agreement(SimpleNamespace(array=lambda *flags: flags), requests),
            guard=Guard(anomalies or AnomalyConfig(), Lineage(skipped=set(skip)), lambda state, k: f"{self.batch(k)}"),
            due=due(publish=(every_steps, None), save_steps=save_steps),
            saver=SimpleNamespace(
                save=lambda state: self.log.append(("save", state)),
                report_saved=lambda: None,
                restore=lambda meta: self.log.append(("restore", meta)),
            ),
            evaluator=Evaluations(self.log),
            previewer=None,
            publisher=Publisher(Throughput(1.0, 1, 1), LAYOUT, self.publish, clock=lambda: 0.0),
            resume=SimpleNamespace(go_back=self.go_back, meta="meta"),
            hooks=BaseTrainer.__new__(BaseTrainer),
            callbacks=CallbackList(),
        )

    def batch(self, k):
        self.log.append(("batch", k))
        return k

    def step(self, state, metric_sums, batch, flags):
        self.dispatched += 1
        self.asked.append(flags)
        stop, saves, skip, wait, batch_index = flags
        status = UpdateStatus.ORDERED if skip else self.statuses.pop(batch_index, UpdateStatus.APPLIED)
        told = reduced(stop, saves, status, int(wait * 1e6), batch_index, batch_index + (status is UpdateStatus.OUT_OF_STEP))
        made = OnDevice(self, "sums", self.dispatched, np.ones((len(LAYOUT), 2)))
        rest = {"flags": told, "measured": [], "distributions": []}
        return StepOutput(state + 1, made, *(OnDevice(self, kind, self.dispatched, made) for kind, made in rest.items()))

    def go_back(self, decision):
        self.log.append(("go_back", decision.go_back_to))
        return decision.go_back_to, decision.go_back_to

    def publish(self, step, metrics, seconds, distributions):
        self.log.append(("publish", step))


def test_the_host_never_waits_for_a_step_that_is_not_two_behind():
    world = World(max_steps=40, every_steps=10)
    assert world.loop.run(0) == (40, StopReason.MAX_STEPS)
    assert world.touched[0] == ("wait", "flags", 1, 1)  # the first step alone: recovery is measured to its end
    between = [touch for touch in world.touched[1:] if touch[3] < 40]
    assert {kind for _, kind, _, _ in between} == {"flags", "sums", "distributions"}
    assert all(how == "fetch" and dispatched - step >= 2 for how, _, step, dispatched in between)
    fetched = [step for _, kind, step, _ in world.touched if kind == "sums"]
    assert fetched == [10, 20, 30, 40]  # only what is published is ever fetched
    assert [step for _, kind, step, _ in world.touched if kind == "distributions"] == [20, 40]
    assert [step for kind, step in world.log if kind == "publish"] == [10, 20, 30, 40]


class Looks(Callback):
    """At every event, at all that it is given."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda state, **kwargs: self.events.append((name, kwargs))
        return super().__getattribute__(name)


def test_with_everything_on_nothing_more_is_waited_for_between_publishes(tmp_path):
    """Callbacks at every event, distributions, a profile on schedule and one on demand."""
    config = ProfileConfig(skip_steps=3, record_steps=2)
    quiet, loud = World(), World()
    looks = Looks()
    for callback in (Profiler(config, str(tmp_path)), looks):
        loud.loop.callbacks.add(callback)

    def batch(k):
        if k == 25:
            runtime.current().request_profile({"id": "asked", "steps": 2})
        return k

    loud.loop.loader.batch = batch
    assert loud.loop.run(0) == quiet.loop.run(0) == (40, StopReason.MAX_STEPS)
    assert loud.touched == quiet.touched
    loud.loop.callbacks.call(Callback.on_train_end, loud.info)
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert {"on_step_begin", "on_step_end", "on_epoch_begin", "on_epoch_end"} <= {name for name, _ in looks.events}


def test_what_is_not_due_yet_at_the_end_is_published_all_the_same():
    world = World(max_steps=13, every_steps=10)
    world.loop.run(0)
    assert [step for kind, step in world.log if kind == "publish"] == [10, 13]


def test_a_save_comes_before_the_next_batch_is_drawn():
    world = World(max_steps=6, save_steps=2)
    world.loop.run(0)
    order = [entry for entry in world.log if entry[0] in ("save", "batch")]
    assert order == [("batch", 0), ("batch", 1), ("save", 2), ("batch", 2), ("batch", 3), ("save", 4), ("batch", 4), ("batch", 5)]


def test_a_stop_request_travels_through_the_step_and_stops_two_steps_later():
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


def test_each_save_request_is_granted_once():
    world = World(max_steps=30)

    def batch(k):
        if k in (5, 15):
            runtime.current().request_save()
        return k

    world.loop.loader.batch = batch
    world.loop.run(0)
    assert [state for kind, state in world.log if kind == "save"] == [8, 18]


def test_a_request_is_one_more_than_any_host_had():
    host_requests = HostRequests(Limits(None, None), None, clock=lambda: 0.0)
    runtime.install(runtime.Runtime(lambda event: None))
    assert host_requests.requested_saves(Agreed(saves=3)) == 0
    runtime.current().request_save()
    assert host_requests.requested_saves(Agreed(saves=3)) == 4
    assert host_requests.requested_saves(Agreed(saves=4)) == 4


def test_minutes_and_limits_are_requests_by_this_hosts_clock():
    now = [1000.0]
    host_requests = HostRequests(Limits(None, None, deadline_s=1130.0), save_minutes=1.0, clock=lambda: now[0])
    assert (host_requests.stop(), host_requests.requested_saves(Agreed())) == (0, 0)
    now[0] = 1061.0
    assert host_requests.requested_saves(Agreed()) == 1
    now[0] = 1120.0
    assert (host_requests.stop(), host_requests.requested_saves(Agreed())) == (0, 1)  # counted from the last request
    now[0] = 1130.0
    assert STOP_REASONS[host_requests.stop() - 1] is StopReason.TIME_LIMIT


def test_the_window_holds_two_steps():
    window = Window(10)
    for batch_index in (10, 11, 12):
        assert not window.full
        window.push(batch_index, reduced(saves=7 if batch_index == 12 else 0, batch_index=batch_index))
    assert window.full
    assert window.complete_one().saves == 0
    assert (window.completed_step, window.in_flight) == (11, 2)
    assert (window.complete_one().batch_index, window.complete_one().saves) == (11, 7)
    assert window.completed_step == 13


def test_what_all_hosts_read_of_a_step():
    agreed = Agreed.read(reduced(2, 3, UpdateStatus.LOSS_SPIKE, 250_000, 17, loss=9.5, expected=np.nan))
    assert (agreed.stop_reason, agreed.saves, agreed.status) == (STOP_REASONS[1], 3, UpdateStatus.LOSS_SPIKE)
    assert (agreed.batch_index, agreed.loss, agreed.data_wait_s) == (17, 9.5, 0.25)
    assert np.isnan(agreed.expected_loss)


# ---------------------------------------------------------------------- where a run ends


@pytest.mark.parametrize(
    ("limits", "at", "reason"),
    [
        (Limits(8, None), 7, None),
        (Limits(8, None), 8, StopReason.MAX_STEPS),
        (Limits(None, 5), 5, StopReason.MAX_EPOCHS),
        (Limits(None, None, stop_at=5), 4, None),
        (Limits(None, None, stop_at=5), 5, StopReason.RESIZE),
        (Limits(None, None, stop_at=5), 9, StopReason.RESIZE),
        (Limits(5, None, stop_at=5), 5, StopReason.MAX_STEPS),
        (Limits(5, None, time_is_up=True), 3, StopReason.TIME_LIMIT),
        (Limits(5, None, time_is_up=True), 5, StopReason.MAX_STEPS),
    ],
)
def test_limits_count_batches(limits, at, reason):
    assert limits.reached(RunInfo(global_step=at)) is reason


def test_what_a_person_asked_for_outweighs_what_happens_to_machines():
    order = STOP_REASONS.index
    assert order(StopReason.RESIZE) < order(StopReason.PREEMPTED) < order(StopReason.INTERRUPTED) < order(StopReason.REQUESTED)
    assert [reason for reason in (StopReason.RESIZE, StopReason.PREEMPTED) if reason.finished] == []


def test_a_notice_stops_the_run_and_is_reported_once():
    host = runtime.Runtime(lambda event: None)
    host.notice("SIGTERM")
    host.notice("SIGTERM")
    assert host.stop_reason == "preempted"
    assert (host.take_notice(), host.take_notice()) == ({"reason": "SIGTERM", "deadline_s": None}, None)


def test_the_term_of_the_driver_is_told_at_once_and_whenever_another_one_takes_over():
    host, seen = runtime.Runtime(lambda event: None, driver_term=2), []
    host.follow_driver(seen.append)
    host.taken_over(3)
    assert (seen, host.driver_term) == ([2, 3], 3)


# ---------------------------------------------------------------------- a save that failed


def test_a_failed_save_is_tried_again_ever_later():
    retry, tries = Retry(), []
    for now_s in range(2000):
        if retry.due(True, float(now_s)):
            tries.append(now_s)
            retry.tried(float(now_s))
    gaps = np.diff([0, *tries]).tolist()
    assert gaps[:5] == [RETRY_FIRST_S, 20, 40, 80, 160]
    assert set(gaps[5:]) == {RETRY_MAX_S}


def test_a_save_made_good_ends_the_tries_and_the_next_failure_begins_anew():
    retry = Retry()
    assert not retry.due(True, 0.0)
    assert retry.due(True, 10.0)
    assert not retry.due(True, 11.0)  # requested, not started yet
    retry.tried(12.0)
    assert not retry.due(True, 31.0)
    assert not retry.due(False, 40.0)
    assert not retry.due(True, 50.0)
    assert retry.due(True, 60.0)


def test_a_try_that_another_host_requested_counts():
    retry = Retry()
    assert not retry.due(True, 0.0)
    retry.tried(9.0)
    assert not retry.due(True, 28.0)
    assert retry.due(True, 29.0)


def test_a_failed_save_is_a_request():
    now, failing = [0.0], [True]
    host_requests = HostRequests(Limits(None, None), None, lambda: failing[0], clock=lambda: now[0])
    runtime.install(runtime.Runtime(lambda event: None))
    assert host_requests.requested_saves(Agreed()) == 0
    now[0] = RETRY_FIRST_S
    assert host_requests.requested_saves(Agreed(saves=4)) == 5
    host_requests.saved()
    assert host_requests.requested_saves(Agreed(saves=5)) == 5
    now[0] += 2 * RETRY_FIRST_S  # that one failed too
    assert host_requests.requested_saves(Agreed(saves=5)) == 6


def test_a_request_is_known_before_the_batch_is_drawn_that_is_looked_ahead_to():
    window, num_steps = Window(0), 0
    while not window.full:  # then the loop waits for the step with the request
        window.push(num_steps, np.zeros(7, np.int32))
        num_steps += 1
    assert num_steps == LOOK_AHEAD_STEPS


# ---------------------------------------------------------------------- batches that are not trained on


def test_batches_to_skip_are_flagged():
    world = World(max_steps=6, skip=(2, 4))
    world.loop.run(0)
    assert [flags[2] for flags in world.asked] == [False, False, True, False, True, False]
    assert [flags[-1] for flags in world.asked] == [0, 1, 2, 3, 4, 5]


def test_a_batch_that_the_step_skipped_is_reported_and_remembered():
    world = World(max_steps=9, statuses={4: UpdateStatus.NON_FINITE})
    assert world.loop.run(0) == (9, StopReason.MAX_STEPS)
    assert world.loop.guard.lineage.skipped == {4}
    assert [kind for kind, _ in world.log].count("anomaly") == 1


def test_a_save_knows_the_statuses_of_all_batches_before_it():
    world = World(max_steps=9, save_steps=5, statuses={4: UpdateStatus.NON_FINITE})
    known = []
    world.loop.saver.save = lambda state: known.append((state, set(world.loop.guard.lineage.skipped)))
    world.loop.run(0)
    assert known == [(5, {4})]


def test_a_rollback_goes_back_and_leaves_the_batches_out():
    config = AnomalyConfig(non_finite="rollback", skip_before=2)
    world = World(max_steps=12, anomalies=config, statuses={7: UpdateStatus.NON_FINITE})
    state, reason = world.loop.run(0)
    assert (state, reason) == (12, StopReason.MAX_STEPS)
    assert [entry for entry in world.log if entry[0] == "go_back"] == [("go_back", 5)]
    drawn = [k for kind, k in world.log if kind == "batch"]
    assert drawn == [*range(10), 7, *range(5, 12)]  # two steps were in flight when it was read; 7 again, to see why
    assert [flags[-1] for flags in world.asked if flags[2]] == [5, 6, 7]
    assert [kind for kind, _ in world.log].count("first_step") == 1


def test_an_anomaly_in_the_last_steps_is_found_before_the_end_and_before_a_save():
    config = AnomalyConfig(non_finite="rollback")
    world = World(max_steps=8, save_steps=4, anomalies=config, statuses={3: UpdateStatus.NON_FINITE, 7: UpdateStatus.NON_FINITE})
    assert world.loop.run(0)[0] == 8
    assert [entry for entry in world.log if entry[0] in ("save", "go_back")] == [("go_back", 3), ("save", 4), ("go_back", 7)]


@pytest.mark.parametrize(
    ("status", "config", "error"),
    [
        (UpdateStatus.NON_FINITE, AnomalyConfig(non_finite="raise"), NonFiniteLossError),
        (UpdateStatus.LOSS_SPIKE, AnomalyConfig(loss_spike="raise"), LossSpikeError),
    ],
)
def test_a_policy_may_want_an_error(status, config, error):
    with pytest.raises(error, match="batch 3") as raised:
        World(anomalies=config, statuses={3: status}).loop.run(0)
    assert exception_event(raised.value)["step"] == 4  # that of the batch, not the one that was dispatched meanwhile


def test_hosts_out_of_step_are_an_error_that_names_the_step():
    with pytest.raises(
        DesyncError, match=r"out of step at batch 3: .* batches 3 to 4 \(host 0 at 3\); .* skipped or repeated a step"
    ):
        World(statuses={3: UpdateStatus.OUT_OF_STEP}).loop.run(0)


def test_waiting_is_no_business():
    now = [0.0]
    busy = BusyTime(clock=lambda: now[0])
    now[0] = 2.0
    with busy.waiting():
        now[0] = 10.0
    now[0] = 11.0
    assert busy.total_s == 3.0
