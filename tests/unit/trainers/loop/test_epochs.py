"""Epochs and limits: a run that is cut anywhere, and goes on, ends where an undisturbed one does, with the same samples."""

from __future__ import annotations

import pytest

from gangway.stop_reason import StopReason
from tests.unit.training import FIXED, StopAt, assert_equal, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer

BATCH = 40
"""Of 96 examples an epoch: batches 2 and 4 straddle two epochs, and 8 batches fill three; so the last epoch begins in batch 4 and
ends 32 examples before the end of batch 7."""
LAST = 8


class Counting(BaseTrainer):
    """Counts the epochs that begin and end, over all processes of a run."""

    seen: list

    def on_epoch_begin(self, state, epoch):
        self.seen.append(("begin", epoch))
        return state

    def on_epoch_end(self, state, epoch):
        self.seen.append(("end", epoch))
        return state


def three_epochs(tmp_path, seen, *callbacks, **changes):
    settings = {"max_num_steps": None, "max_num_data_epochs": 3, "global_batch_size": BATCH, "optimizer": FIXED}
    settings |= {"checkpoint": {}, "evaluation": {"max_batches": 1, "every_epochs": 1}}
    made = trainer(tmp_path, *callbacks, cls=Counting, **(settings | changes))
    made.seen = seen
    return made


def evaluated(events):
    return [event["step"] for event in of(events, "metrics") if event.get("kind") == "eval"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    seen = []
    made = three_epochs(tmp_path_factory.mktemp("whole"), seen)
    state = made.train()
    assert made.output.stop_reason is StopReason.MAX_EPOCHS
    assert made.output.metrics["batches"] == LAST
    assert seen == [(what, epoch) for epoch in range(3) for what in ("begin", "end")]
    return state, made.output.metrics, seen


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("cut", [1, 3, 5, 6, 7, 8])
def test_a_resume_in_or_at_the_edge_of_any_epoch_neither_stops_early_nor_repeats(tmp_path, events, undisturbed, cut):
    """Others end a run that is resumed in its last epoch at once, or train that epoch again."""
    state, metrics, epochs = undisturbed
    seen = []
    three_epochs(tmp_path, seen, max_num_steps=cut, evaluation={"max_batches": 1}).train()
    resumed = three_epochs(tmp_path, seen)
    last = resumed.train()
    assert of(events, "restored")[-1]["step"] == cut
    assert_equal(last, state)
    assert resumed.output.stop_reason is StopReason.MAX_EPOCHS
    assert {name: resumed.output.metrics[name] for name in ("samples", "samples_digest", "batches")} == {
        name: metrics[name] for name in ("samples", "samples_digest", "batches")
    }
    assert seen == epochs


def test_started_again_after_its_last_epoch_a_run_trains_nothing(tmp_path, events):
    seen = []
    first = three_epochs(tmp_path, seen)
    first.train()
    assert evaluated(events) == [3, 5, 8]
    events.clear()
    again = three_epochs(tmp_path, seen)
    again.train()
    assert again.output.metrics == first.output.metrics
    assert of(events, "first_step") == evaluated(events) == []
    more = three_epochs(tmp_path, seen, max_num_data_epochs=4)
    more.train()
    assert more.output.metrics["batches"] == 10  # from where the third epoch ended
    assert seen == [(what, epoch) for epoch in range(4) for what in ("begin", "end")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limits", [{"max_num_steps": 8}, {"max_num_steps": 8, "max_num_data_epochs": 3}])
def test_a_stop_request_is_honoured_when_a_step_limit_is_set(tmp_path, events, undisturbed, limits):
    """Others ask whether to stop only where nothing limits the steps."""
    stopped = three_epochs(tmp_path, [], StopAt(3, "requested"), **limits)
    stopped.train()
    assert stopped.output.stop_reason is StopReason.REQUESTED
    assert 3 < stopped.output.metrics["batches"] < LAST
    runtime.install(runtime.Runtime(events.append))
    assert_equal(three_epochs(tmp_path, [], **limits).train(), undisturbed[0])


@pytest.mark.parametrize(("limits", "reason", "batches"), [((3, 2), "max_steps", 3), ((9, 1), "max_data_epochs", 3)])
def test_the_limit_that_is_reached_first_ends_the_run(tmp_path, events, limits, reason, batches):
    steps, epochs = limits
    made = three_epochs(tmp_path, [], max_num_steps=steps, max_num_data_epochs=epochs)
    made.train()
    assert (made.output.stop_reason, made.output.metrics["batches"]) == (reason, batches)
