import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.driver.generation import Failed, Finished, Generation, Paused, in_order

_time = itertools.count(1)


def event(name, at_s=None, **more):
    return {"t": next(_time) if at_s is None else at_s, "ev": name, **more}


def taken(*events, num_hosts=2, **more):
    generation = Generation(0, num_hosts, **more)
    for host, what in events:
        generation.observe(host, what)
    return generation


def started(num_hosts=2, step=1):
    """Every host's way to its first step."""
    phases = [
        (host, event("phase", phase=phase)) for phase in ("join", "restore", "compile", "train") for host in range(num_hosts)
    ]
    return phases + [(host, event("first_step", step=step, resumed_step=step - 1)) for host in range(num_hosts)]


def test_the_gang_is_in_the_phase_of_its_least_advanced_host():
    generation = taken((0, event("phase", phase="compile")), (1, event("phase", phase="join")))
    assert (generation.phase, generation.category) == ("join", "join")
    assert taken((0, event("phase", phase="compile"))).phase == "import"
    assert taken(*started()).category == "step"


def test_steps_up_to_the_furthest_of_before_are_replay():
    generation = taken(*started(step=5), high_water_step=6)
    assert generation.category == "replay"
    generation.observe(0, event("heartbeat", step=6))
    assert generation.category == "step"
    assert generation.resumed_step == 4


@pytest.mark.parametrize(
    ("what", "how"),
    [
        (event("exit", code=1), "exit"),
        (event("exception", type="ValueError"), "exception"),
        (event("overdue", phase="train", limit_s=3.0, waited_s=3.0), "overdue"),
    ],
    ids=["an exit", "an exception", "a limit that has passed"],
)
def test_nothing_more_is_expected_after(what, how):
    generation = taken((1, what))
    assert generation.wants_restart
    assert generation.broken == {1: how}
    assert not taken((1, event("notice", reason="SIGTERM")), (0, event("saving", step=3))).wants_restart


def test_the_first_limit_that_passed_counts():
    generation = taken(
        (1, event("overdue", phase="save")), (1, event("overdue", phase="train")), (0, event("overdue", phase="train"))
    )
    assert {host: told["phase"] for host, told in generation.overdue.items()} == {1: "save", 0: "train"}


def test_a_notice_that_the_node_goes_replaces_one_that_only_the_process_got():
    process, node, again = (event("notice", reason=r, node=n) for r, n in (("SIGTERM", False), ("drain", True), ("TERM", False)))
    generation = taken((1, process), (1, node), (1, again))
    assert generation.notices == {1: node}


def test_the_exit_of_a_host_that_was_done_is_no_failure():
    done = event("done", step=9, stop_reason="max_steps", result={})
    generation = taken((0, done), (0, event("exit", code=0)), (1, done))
    assert (generation.broken, generation.exited, generation.finished) == ({}, {0}, True)


def test_why_it_stopped_is_known_once_all_have_stopped():
    done = event("done", step=9, stop_reason="resize", result={})
    generation = taken((0, done))
    assert (generation.end, generation.finished) == (None, False)
    generation.observe(1, done)
    assert (generation.end, generation.wants_restart) == (Paused("resize", {}), False)


def test_how_a_generation_ended_is_a_value():
    done = event("done", step=9, stop_reason="max_steps", result={"loss": 1.0})
    assert taken((0, done), (1, done)).end == Finished("max_steps", {"loss": 1.0})
    assert taken((0, done), (1, event("exit", code=1))).end == Failed()
    assert taken((0, done)).end is None
    assert taken((1, event("exit", code=1)), (0, done), (1, done)).end == Finished("max_steps", {"loss": 1.0})


def test_a_save_in_flight_changes_no_category_and_ends_when_it_failed_too():
    generation = taken(*started(), (0, event("saving", step=1)), (1, event("saving", step=1)))
    assert (generation.category, generation.saving) == ("step", {0: 1, 1: 1})
    generation.observe(0, event("saved", step=1, path="p"))
    generation.observe(1, event("save_failed", step=1, error="full"))
    assert (generation.saving, generation.saved) == ({}, {0: 1})


def rollback(at_s, to=4):
    return event("anomaly", at_s, kind="loss_spike", batch_index=8, action="rollback", skipped_batches=[8], restored_step=to)


def test_a_rollback_sets_the_steps_back_and_what_follows_is_replay():
    generation = taken(*started(), (0, event("heartbeat", 100.0, step=9)), (0, rollback(101.0)))
    assert (generation.step, generation.restored_step, generation.high_water_step) == (4, 4, 9)
    assert generation.category == "replay"
    generation.observe(1, event("heartbeat", 100.5, step=9))  # on its way when host 0 told of the rollback
    assert generation.step == 4
    generation.observe(0, event("heartbeat", 102.0, step=9))
    assert generation.category == "step"


def test_a_skipped_batch_sets_nothing_back():
    skip = event("anomaly", kind="non_finite", batch_index=8, action="skip", skipped_batches=[8], restored_step=None)
    generation = taken(*started(), (0, event("heartbeat", step=9)), (0, skip))
    assert (generation.step, generation.restored_step, generation.anomalies) == (9, None, [skip])


def test_when_all_hosts_had_entered_a_phase():
    generation = taken(
        (0, event("phase", 10.0, phase="join")), (1, event("phase", 12.0, phase="join")), (0, event("phase", 13.0, phase="train"))
    )
    assert generation.all_entered_s("join") == 12.0
    assert generation.all_entered_s("train") is None
    generation.observe(1, event("phase", 20.0, phase="join"))  # told again after a rollback
    assert generation.all_entered_s("join") == 12.0


EVENTS = [
    *started(),
    (0, event("saving", step=2)),
    (1, event("saving", step=2)),
    (0, event("saved", step=2, path="p")),
    (1, event("save_failed", step=2, error="full")),
    (0, event("phase", phase="restore")),
    (0, event("phase", phase="train")),
    (0, rollback(next(_time), to=2)),
    (1, event("notice", reason="SIGTERM")),
    (0, event("saving", step=4)),
    (1, event("overdue", phase="train", limit_s=3.0, waited_s=3.1)),
    (0, event("done", step=5, stop_reason="preempted", result={})),
    (0, event("exit", code=0)),
    (1, event("exit", code=1)),
]


@given(st.integers(0, len(EVENTS)), st.integers(0, len(EVENTS)))
def test_what_a_driver_before_had_taken_may_be_taken_again(num_known, num_again):
    """The driver that adopts a gang gets all events from the beginning; one that had them already is none the wiser."""
    known = EVENTS[:num_known]
    assert taken(*known, *known) == taken(*known)
    assert taken(*EVENTS[:num_again], *EVENTS) == taken(*EVENTS)


def test_hosts_are_taken_in_the_order_in_which_things_happened():
    answers = {
        0: [event("phase", 1.0, phase="join"), event("phase", 5.0, phase="train"), event("saved", 9.0, step=3)],
        1: [event("phase", 2.0, phase="join"), event("phase", 1.5, phase="train"), event("done", 8.0, step=3)],
    }
    rows = in_order(answers)
    assert [(host, place) for host, place, _ in rows] == [(0, 0), (1, 0), (1, 1), (0, 1), (1, 2), (0, 2)]
    assert all(answers[host][place] is what for host, place, what in rows)
    assert in_order({}) == []


def silence(waited_s=60.0):
    return event("overdue", phase="silence", limit_s=60.0, waited_s=waited_s, stacks=None, state=None, log_tail=[])


def test_a_gang_hangs_when_all_its_hosts_are_silent():
    generation = taken(num_hosts=3)
    generation.note_silence(0, silence())
    generation.note_silence(1, silence())
    assert not generation.wants_restart
    generation.note_silence(0, None)
    generation.note_silence(2, silence())
    assert not generation.wants_restart
    generation.note_silence(0, silence())
    assert generation.broken == dict.fromkeys(range(3), "overdue")
    assert set(generation.overdue) == {0, 1, 2}


def test_hosts_that_are_done_break_no_silence():
    generation = taken((0, event("done", step=0, stop_reason="max_steps", result={})))
    generation.note_silence(0, silence())
    assert not generation.wants_restart
    generation.note_silence(1, silence())
    assert generation.broken == {1: "overdue"}
