"""The progress of an evaluation, by a clock of the test."""

from __future__ import annotations

from tests.event_schema import check_event
from tests.unit.training import of, trainer
from trainers import runtime
from trainers.evaluation import validation


def test_progress_is_reported_at_most_once_a_second_and_counted_at_each_batch(events):
    now = [0.0]
    counted = []
    for _ in validation.reported("eval", range(10), 10, lambda: now[0]):
        counted.append(runtime.current().evaluated_batches)
        now[0] += 0.4
    told = of(events, "evaluating")
    assert [event["done"] for event in told] == [3, 6, 9]
    assert counted == list(range(10))
    for event in told:
        assert (event["unit"], event["total"]) == ("eval", 10)
        check_event(event, "process")


def test_an_evaluation_knows_how_many_batches_there_are(tmp_path, events, monkeypatch):
    monkeypatch.setattr(validation, "TELL_EVERY_S", 0.0)
    made = trainer(tmp_path, max_num_steps=1, evaluation={"units": {"eval": {}, "few": {"max_batches": 1}}})
    made.train()
    told = [(event["unit"], event["done"], event["total"]) for event in of(events, "evaluating")]
    assert told == [("eval", 1, 2), ("eval", 2, 2), ("few", 1, 1)]


def test_rates_are_without_what_is_left_out():
    now = [0.0]
    watch = validation.Stopwatch(lambda: now[0])
    now[0] = 5.0
    watch.leave_out(2.0)
    rates = watch.rates({"tokens": 400.0, "samples": 40.0}, flops_per_example=60e12, num_devices=4)
    assert rates == {"seconds": 2.0, "tokens_per_s": 200.0, "samples_per_s": 20.0, "tflops_per_s_per_device": 100.0}
