"""Batches that are not trained on, in whole runs of one process: whoever found them, and however, the same bits come out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from cluster.agent.watchdog import Watchdog
from gangway.errors import LossSpikeError, NonFiniteLossError
from gangway.stop_reason import StopReason
from gangway.wire.limits import Limits
from tests.saved import saved
from tests.unit.training import FIXED, assert_equal, losses, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.loop.lineage import SKIPPED_FILE

CLEAN = {"optimizer": FIXED, "publish_every_steps": 1}


class Poison(Callback):
    """Makes the loss of these batches NaN, whenever they come."""

    def __init__(self, *batches):
        self.batches = batches

    def on_step_begin(self, state, *, batch, **kwargs):
        if state.batch_index in self.batches:
            weight = batch["weight"]
            batch["weight"] = jax.device_put(np.full(weight.shape, np.nan, np.float32), weight.sharding)


class Scramble(Callback):
    """Makes these batches such that nothing learnt is of any use for them."""

    def __init__(self, *batches):
        self.batches = batches

    def on_step_begin(self, state, *, batch, **kwargs):
        if state.batch_index in self.batches:
            tokens = batch["tokens"]
            noise = np.random.default_rng(0).integers(0, 256, tokens.shape, np.int32)
            batch["tokens"] = jax.device_put(noise, tokens.sharding)


class Dies(Callback):
    """Ends the process, as far as a test can: at a batch of the stretch that follows a rollback."""

    def __init__(self, batch_index):
        self.batch_index, self.furthest = batch_index, 0

    def on_step_begin(self, state, **kwargs):
        if state.batch_index < self.furthest and state.batch_index == self.batch_index:
            raise KeyboardInterrupt
        self.furthest = max(self.furthest, state.batch_index)


class Beats(Callback):
    """What the process would tell of each step."""

    def __init__(self, told):
        self.told = told

    def on_step_end(self, state, **kwargs):
        host = runtime.current()
        self.told.append({"ev": "heartbeat", "step": host.step, "batch_index": host.batch_index})


def alarms(told):
    """What the watchdog finds in a run whose steps take 10 s, where one may take 25 s."""
    dog, now_s, found = Watchdog(Limits(step_floor_s=25.0, step_factor=0.1), 0.0), 0.0, []
    for event in told:
        now_s += 10.0 * (event["ev"] == "heartbeat")
        found += dog.look(now_s)
        dog.observe(event, now_s)
    return [alarm.phase for alarm in found if alarm.overdue]


def ordered(**orders):
    """A process with these orders; returns what it tells."""
    told: list[dict] = []
    runtime.install(runtime.Runtime(lambda event: told.append(json.loads(json.dumps(event))), **orders))
    return told


@pytest.fixture
def left_out(tmp_path, events):
    """The state and the result of a run that was ordered to skip these batches, on clean data."""

    def run(*batches, **changes):
        ordered(skip_batches=batches)
        made = trainer(tmp_path / "ordered", **CLEAN, **changes)
        return made.train(), made.output.metrics

    return run


def same(result, expected):
    names = ("params_digest", "samples_digest", "skipped_batches", "lineage", "steps", "batches", "samples")
    return {name: result[name] for name in names} == {name: expected[name] for name in names}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_nan_is_left_out_bit_for_bit_as_on_order(tmp_path, left_out, policy):
    state, result = left_out(6)
    told = ordered()
    made = trainer(tmp_path, Poison(6), **CLEAN, anomalies={"non_finite": policy})
    made.add_callback(Beats(told))
    assert_equal(made.train(), state)
    assert alarms(told) == []
    assert same(made.output.metrics, result)
    assert (result["steps"], result["batches"], result["samples"]) == (11, 12, 11 * 16)
    (anomaly,) = of(told, "anomaly")
    assert (anomaly["kind"], anomaly["batch_index"], anomaly["skipped_batches"]) == ("non_finite", 6, [6])
    assert (anomaly["action"], anomaly["restored_step"]) == (policy, 4 if policy == "rollback" else None)
    assert anomaly["loss"] is None
    assert anomaly["expected"] == pytest.approx(5.5, abs=0.3)


def test_a_rollback_leaves_out_the_batches_before_the_bad_one_too(tmp_path, left_out):
    state, result = left_out(4, 5, 6)
    told = ordered()
    made = trainer(tmp_path, Poison(6), **CLEAN, anomalies={"non_finite": "rollback", "skip_before": 2})
    assert_equal(made.train(), state)
    assert same(made.output.metrics, result)
    assert of(told, "anomaly")[0]["restored_step"] == 4
    assert [event["phase"] for event in of(told, "phase")] == [
        *("restore", "compile", "train"),
        *("diagnose", "train"),
        *("restore", "train"),
        *("evaluate", "save", "finish"),
    ]
    assert json.loads((tmp_path / "run" / SKIPPED_FILE).read_text())["skipped_batches"] == [4, 5, 6]
    assert len(of(told, "first_step")) == 1


def test_checkpoints_of_the_trajectory_left_are_made_anew(tmp_path, left_out):
    """The rollback goes behind checkpoint 4, to the beginning; a later process must not go on from what 4 was."""
    state, result = left_out(3, 4, 5, 6)
    settings = {**CLEAN, "anomalies": {"non_finite": "rollback", "skip_before": 3}}
    told = ordered()
    made = trainer(tmp_path, Poison(6), **settings, max_num_steps=7)
    made.train()
    assert of(told, "anomaly")[0]["restored_step"] == 0
    assert [event["step"] for event in of(told, "saved")] == [4, 4, 7]
    told = ordered()
    made = trainer(tmp_path, **settings)
    assert_equal(made.train(), state)
    assert same(made.output.metrics, result)
    assert of(told, "restored")[0] | {"t": 0} == {"t": 0, "ev": "restored", "step": 7, "skipped": []}


@pytest.mark.slow("trains three times")
@pytest.mark.parametrize(("skip_before", "restored"), [(2, 4), (3, None)])
def test_a_process_that_dies_after_a_rollback_loses_none_of_it(tmp_path, left_out, skip_before, restored):
    """Before the next checkpoint: the file alone knows what to leave out."""
    skipped = range(6 - skip_before, 7)
    state, result = left_out(*skipped)
    settings = {**CLEAN, "anomalies": {"non_finite": "rollback", "skip_before": skip_before}}
    ordered()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, Poison(6), Dies((restored or 0) + 1), **settings).train()
    told = ordered()
    made = trainer(tmp_path, Poison(6), **settings)
    assert_equal(made.train(), state)
    assert same(made.output.metrics, result)
    assert [event["step"] for event in of(told, "restored")] == ([restored] if restored else [])
    assert of(told, "anomaly") == []
    # What lies beyond is named, not silently passed over.
    named = [event["message"] for event in of(told, "note") if "abandoned" in event["message"]]
    assert len(named) == (0 if restored else 1)


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_loss_spike_is_left_out_and_the_statistics_ignore_it(tmp_path, left_out, policy):
    learning = {"max_num_steps": 30, "optimizer": {"name": "adamw", "learning_rate": 0.1}, "publish_every_steps": 1}
    anomalies = {"loss_spike": policy, "spike_warmup_steps": 10, "spike_zscore": 2.0}
    ordered(skip_batches=(20,))
    state = trainer(tmp_path / "ordered", **learning, anomalies=anomalies).train()
    told = ordered()
    made = trainer(tmp_path, Scramble(20), **learning, anomalies=anomalies)
    assert_equal(made.train(), state)  # the statistics are of the state
    (anomaly,) = of(told, "anomaly")
    assert (anomaly["kind"], anomaly["batch_index"], anomaly["action"]) == ("loss_spike", 20, policy)
    assert anomaly["loss"] > anomaly["expected"] > 0
    assert int(state.loss_stats["count"]) == int(state.step) == 29


def test_what_was_skipped_is_counted_and_enters_no_mean(tmp_path, events):
    made = trainer(tmp_path, Poison(5, 6), **CLEAN | {"publish_every_steps": 4})
    made.train()
    published = {e["step"]: e["metrics"] for e in of(events, "metrics") if "skipped_batches" in e["metrics"]}
    assert {step: metrics["skipped_batches"] for step, metrics in published.items()} == {4: 0.0, 8: 2.0, 12: 0.0}
    assert all(np.isfinite(loss) for loss in losses(events).values())
    ordered(skip_batches=(5, 6))
    other = trainer(tmp_path / "other", **CLEAN | {"publish_every_steps": 4})
    other.train()
    assert made.output.metrics["train_loss"] == other.output.metrics["train_loss"]


def test_an_interval_of_which_nothing_was_trained_on_has_no_loss(tmp_path, events):
    trainer(tmp_path, Poison(5), **CLEAN).train()
    assert sorted(losses(events)) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("callback", "anomalies", "error", "message"),
    [
        (Poison(6), {"non_finite": "raise"}, NonFiniteLossError, "batch 6 has a non-finite loss or gradient"),
        (
            Poison(2, 4, 6),
            {"max_skipped": 2},
            NonFiniteLossError,
            r"with it 3 of the last 10,000 batches would be skipped .*: 2, 4, 6;",
        ),
        (
            Scramble(6),
            {"loss_spike": "raise", "spike_warmup_steps": 2, "spike_zscore": 0.01},
            LossSpikeError,
            "the loss of batch 6, .*, is far above",
        ),
    ],
)
def test_a_run_may_fail_of_it(tmp_path, events, callback, anomalies, error, message):
    quick = {"name": "adamw", "learning_rate": 0.1}
    with pytest.raises(error, match=message):
        trainer(tmp_path, callback, optimizer=quick, anomalies=anomalies, checkpoint={}).train()


# ---------------------------------------------------------------------- orders


@pytest.mark.slow("trains three times")
def test_a_run_stops_where_it_is_to_be_resized_and_goes_on_bit_for_bit(tmp_path, events):
    whole = trainer(tmp_path / "whole", **CLEAN)
    state = whole.train()
    ordered(stop_at=5)
    cut = trainer(tmp_path, **CLEAN)
    cut.train()
    assert cut.output.stop_reason is StopReason.RESIZE
    assert cut.output.checkpoint_path == str(saved(tmp_path / "run", 5))
    ordered()
    resumed = trainer(tmp_path, **CLEAN)
    assert_equal(resumed.train(), state)
    assert same(resumed.output.metrics, whole.output.metrics)
    assert whole.output.metrics["lineage"] == [
        {"batch_index": 0, "num_hosts": 1, "num_devices": 8, "mesh": {"data": 8, "fsdp": 1, "expert": 1, "tensor": 1}}
    ]


class FastClock(BaseTrainer):
    """Waits a thousandth of the time before it tries a save again."""

    def on_training_start(self, state):
        self.training.loop.agreement.requests.clock = lambda: 1000 * time.monotonic()
        return state


class InTheWay(Callback):
    """A file in the place of a folder, until step 60; and takes its time for each step."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, state, **kwargs):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("in the way")

    def on_step_end(self, state, **kwargs):
        if state.global_step == 60:
            self.path.unlink()
        time.sleep(0.001)


@pytest.mark.slow("compiles a step and trains")
def test_a_failed_save_is_made_good_while_training_goes_on(tmp_path, events):
    """The first save finds a file in the place of its folder, which is gone a little later."""
    folder = tmp_path / "run" / "checkpoints"
    made = trainer(
        tmp_path, InTheWay(folder), cls=FastClock, max_num_steps=400, optimizer=FIXED, publish_every_steps=50, checkpoint={}
    )
    runtime.current().request_save()
    made.train()
    assert all(event["step"] <= 60 for event in of(events, "save_failed"))
    assert len(of(events, "save_failed")) >= 1
    saved = [event["step"] for event in of(events, "saved")]
    assert 60 <= saved[0] < 400
    assert saved[-1] == 400
    assert len(saved) >= 2  # made good, and the end
