import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.run_state.goodput import CATEGORIES, Goodput, check_sum, share
from orchestrator.run_state.incidents import Action, Incident, of_anomaly

events = st.lists(
    st.one_of(
        st.tuples(st.just("switch"), st.sampled_from(CATEGORIES), st.floats(-5, 50)),
        st.tuples(st.just("move"), st.sampled_from(CATEGORIES), st.sampled_from(CATEGORIES), st.floats(-5, 50)),
        st.tuples(st.just("resume"), st.floats(-5, 20)),
        st.tuples(st.just("totals"), st.floats(-5, 20)),
    )
)


@given(events, st.floats(0, 100))
def test_categories_sum_to_the_wall_clock_whatever_happens(happened, rest_s):
    clock, now_s = Goodput(1000.0), 1000.0
    for name, *arguments in happened:
        if name == "switch":
            category, elapsed_s = arguments
            now_s += elapsed_s
            clock.switch(category, now_s)
        elif name == "move":
            clock.move(*arguments)
        elif name == "totals":
            now_s += arguments[0]
            assert check_sum(clock.totals(now_s), clock.wall_s(now_s)) == ""
        else:
            clock = Goodput.resume(json.loads(json.dumps(clock.to_dict(now_s))))
            now_s += arguments[0]
    now_s += rest_s
    totals = clock.totals(now_s)
    assert sum(totals.values()) == pytest.approx(clock.wall_s(now_s), rel=1e-9, abs=1e-6)
    assert clock.wall_s(now_s) >= now_s - clock.started_at_s - 1e-6
    assert min(totals.values()) >= 0
    assert set(totals) == set(CATEGORIES)


def test_switch_and_totals():
    clock = Goodput(100.0)
    clock.switch("step", 103.0)
    clock.switch("detection", 113.0)
    totals = clock.totals(114.0)
    assert {name: s for name, s in totals.items() if s} == {"start": 3.0, "step": 10.0, "detection": 1.0}
    assert (clock.category, clock.wall_s(114.0)) == ("detection", 14.0)
    assert share(clock.totals(120.0)) == 0.5
    clock.switch("finish", 120.0)
    assert share(clock.totals(140.0)) == 0.5  # whoever is told it while the run ends hears the same
    assert share({}) == share({"finish": 3.0}) == 0.0


def test_move_takes_what_is_there_and_no_more():
    clock = Goodput(0.0, "step")
    clock.totals(10.0)
    assert clock.move("step", "data_wait", 4.0) == 4.0
    assert clock.move("step", "checkpoint", 100.0) == 6.0
    assert clock.move("step", "checkpoint", -1.0) == 0.0
    totals = clock.totals(10.0)
    assert (totals["step"], totals["data_wait"], totals["checkpoint"]) == (0.0, 4.0, 6.0)


def test_a_clock_that_runs_backwards_loses_nothing():
    clock = Goodput(100.0)
    clock.switch("step", 110.0)
    clock.switch("finish", 105.0)
    assert clock.totals(111.0)["finish"] == 1.0
    assert clock.totals(90.0)["finish"] == 1.0


def resumed():
    clock = Goodput(100.0, "step")
    return Goodput.resume(json.loads(json.dumps(clock.to_dict(110.0))))


def test_while_there_is_no_driver_the_category_goes_on():
    clock = resumed()
    assert (clock.started_at_s, clock.counted_to_s, clock.category) == (100.0, 110.0, "step")
    clock.switch("checkpoint", 112.5)  # an event that waited for this driver
    totals = clock.totals(113.0)
    assert (totals["step"], totals["checkpoint"], totals["detection"]) == (12.5, 0.5, 0.0)


def test_events_that_the_driver_before_had_counted_change_nothing_once_the_last_of_them_is_taken():
    clock = resumed()
    for category, at_s in (("import", 101.0), ("compile", 103.0), ("step", 104.0), ("evaluation", 112.0)):
        clock.switch(category, at_s)
    totals = clock.totals(112.5)
    assert {name: s for name, s in totals.items() if s} == {"step": 12.0, "evaluation": 0.5}


def test_with_the_gang_lost_the_time_without_a_driver_is_detection():
    clock = resumed()
    clock.switch("detection", clock.counted_to_s)
    clock.switch("schedule", 112.5)
    totals = clock.totals(113.0)
    assert (totals["step"], totals["detection"], totals["schedule"]) == (10.0, 2.5, 0.5)


def test_a_sum_that_is_off_is_reported_with_both_numbers():
    assert check_sum({"step": 10.0, "idle": 0.005}, 10.0) == ""
    assert check_sum({"step": 10.0, "idle": 0.5}, 10.0) == (
        "the ledger's categories sum to 10.500 s, the wall clock is 10.000 s: expected within 0.1%"
    )


def test_unknown_category_is_refused():
    with pytest.raises(ValueError, match="goodput category 'steps': expected one of start, schedule"):
        Goodput(0.0).switch("steps", 1.0)


def incident(**more):
    return Incident(kind="process_crash", host=1, generation=0, step=40, failed_at_s=100.0, **more)


def test_recovery_phases_follow_one_another_and_the_step_itself_is_not_lost():
    it = incident()
    for phase, at_s in [("detect", 100.02), ("kill", 100.05), ("join", 100.1), ("restore", 100.2), ("compile", 100.3)]:
        it.mark(phase, at_s)
    it.recovered(100.5, median_step_s=0.1)
    assert list(it.recovery_s) == ["detect", "kill", "join", "restore", "compile", "first_step"]
    assert it.recovery_s["first_step"] == pytest.approx(0.1)
    assert (it.total_s, it.step_s) == (pytest.approx(0.4), 0.1)


def test_marks_out_of_order_do_not_go_below_zero_and_repeated_phases_add_up():
    it = incident()
    it.mark("detect", 99.0)
    it.mark("wait", 101.0)
    it.mark("kill", 100.5)
    it.mark("wait", 102.0)
    it.recovered(102.0, median_step_s=5.0)
    assert it.recovery_s == {"detect": 0.0, "wait": 2.0, "kill": 0.0, "first_step": 0.0}


def test_incident_survives_json():
    it = incident(evidence={"summary": "killed"}, action="restart", resumed_step=30)
    it.mark("detect", 100.5)
    data = json.loads(json.dumps(it.to_dict()))
    assert data["total_s"] == 0.5
    assert Incident.from_dict(data) == it


def test_an_incident_is_read_without_what_it_does_not_know():
    happened = incident(action="give up", detail="enough")
    assert Incident.from_dict({**happened.to_dict(), "unheard_of": 1}) == happened


@pytest.mark.parametrize(
    ("action", "resumed_step", "is_open"),
    [
        (Action.RESTART, None, True),
        (Action.REPLACE, None, True),
        (Action.SHRINK, None, True),
        (Action.GROW, None, True),
        (Action.RESTART, 30, False),
        (Action.SKIP, None, False),
        (Action.ROLLBACK, None, False),
        (Action.ADOPT, None, False),
        (Action.REPORT, None, False),
        (Action.GIVE_UP, None, False),
        ("", None, False),
    ],
)
def test_incident_is_open_until_the_next_generation_takes_a_step(action, resumed_step, is_open):
    assert incident(action=action, resumed_step=resumed_step).open is is_open
    assert (
        Incident.from_dict(json.loads(json.dumps(incident(action=action, resumed_step=resumed_step).to_dict()))).open is is_open
    )


SPIKE = {"t": 50.0, "ev": "anomaly", "kind": "loss_spike", "batch_index": 12, "loss": 9.5, "expected": 2.25}


def test_a_rollback_is_an_incident_that_names_what_is_skipped():
    it = of_anomaly({**SPIKE, "action": "rollback", "skipped_batches": [11, 12], "restored_step": 10}, generation=3)
    assert (it.kind, it.host, it.generation, it.step, it.failed_at_s) == ("loss_spike", None, 3, 12, 50.0)
    assert (it.action, it.detail, it.resumed_step) == ("rollback", "skipped batches: 11, 12", 10)
    assert it.evidence["summary"] == "a loss spike in batch 12 (loss 9.5, expected about 2.25)"
    assert not it.open


def skip(batch, kind="non_finite", action="skip", generation=0, origin=None):
    event = {**SPIKE, "kind": kind, "batch_index": batch, "loss": None, "expected": None, "action": action}
    origin = {"origin": origin} if origin else {}
    return of_anomaly({**event, "skipped_batches": [batch], "restored_step": None, **origin}, generation)


def test_batches_that_are_skipped_for_one_reason_one_after_the_other_are_one_incident():
    it = skip(3, origin="input ['y'] is not finite itself")
    assert [it.takes(skip(batch)) for batch in (4, 5, 105)] == [True] * 3
    assert it.evidence["summary"] == (
        "a loss or gradient that is not finite in 4 batches, 3 to 105: input ['y'] is not finite itself"
    )
    assert (it.step, it.resumed_step, it.detail) == (3, 105, "skipped batches: 4, from 3 to 105")
    assert it.evidence["skipped_batches"] == [3, 4, 5, 105]
    it = Incident.from_dict(json.loads(json.dumps(it.to_dict())))  # as the next driver reads it
    for other in (skip(206), skip(105), skip(106, kind="loss_spike"), skip(106, generation=1), skip(106, action="rollback")):
        assert not it.takes(other)
    assert not incident(action="restart").takes(skip(4))
    assert it.evidence["skipped_batches"] == [3, 4, 5, 105]


def test_a_skipped_batch_without_a_finite_loss_is_an_incident_that_costs_nothing():
    event = {**SPIKE, "kind": "non_finite", "loss": None, "expected": None, "action": "skip", "skipped_batches": [12]}
    it = of_anomaly({**event, "restored_step": None}, generation=0)
    assert it.evidence["summary"] == "a loss or gradient that is not finite in batch 12"
    assert (it.action, it.resumed_step, it.total_s) == ("skip", 12, 0.0)
    json.dumps(it.to_dict())
