import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.ledger import CATEGORIES, Goodput, Incident

events = st.lists(
    st.one_of(
        st.tuples(st.just("switch"), st.sampled_from(CATEGORIES), st.floats(-5, 50)),
        st.tuples(st.just("move"), st.sampled_from(CATEGORIES), st.sampled_from(CATEGORIES), st.floats(-5, 50)),
        st.tuples(st.just("resume"), st.floats(0, 20)),
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
        else:
            data = json.loads(json.dumps(clock.to_dict(now_s)))
            now_s += arguments[0]
            clock = Goodput.resume(data, now_s)
    now_s += rest_s
    totals = clock.totals(now_s)
    assert sum(totals.values()) == pytest.approx(clock.wall_s(now_s), rel=1e-9, abs=1e-6)
    assert min(totals.values()) >= 0
    assert set(totals) == set(CATEGORIES)


def test_switch_and_totals():
    clock = Goodput(100.0)
    clock.switch("step", 103.0)
    clock.switch("detection", 113.0)
    totals = clock.totals(114.0)
    assert {name: s for name, s in totals.items() if s} == {"start": 3.0, "step": 10.0, "detection": 1.0}
    assert (clock.category, clock.wall_s(114.0)) == ("detection", 14.0)
    assert clock.goodput(120.0) == 0.5


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


def test_resume_counts_the_gap_as_detection_or_as_told():
    clock = Goodput(100.0, "step")
    saved = json.loads(json.dumps(clock.to_dict(110.0)))
    resumed = Goodput.resume(saved, 112.5)
    assert resumed.totals(112.5)["detection"] == 2.5
    assert resumed.totals(112.5)["step"] == 10.0
    assert (resumed.started_at_s, resumed.category, resumed.wall_s(113.0)) == (100.0, "detection", 13.0)
    assert Goodput.resume(saved, 112.5, gap="start").totals(112.5)["start"] == 2.5


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
    assert it.total_s == pytest.approx(0.4)


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
