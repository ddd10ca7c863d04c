"""Limits on the time without progress, by tables: every line is (second, event), the clock is a number."""

import re

import pytest

from cluster.agent.watchdog import Alarm, Watchdog
from orchestrator.policies.watchdog import WatchdogConfig

CONFIG = WatchdogConfig(
    import_s=10,
    join_s=20,
    restore_s=30,
    compile_s=40,
    first_step_s=50,
    step_floor_s=6,
    step_factor=10,
    save_s=60,
    evaluate_s=70,
    preview_s=75,
    finish_s=80,
    stacks_before_s=2,
).limits()


def phase(name):
    return {"ev": "phase", "phase": name}


def step(number):
    return {"ev": "heartbeat", "step": number, "batch_index": number, "busy_s": 0.0}


FIRST_STEP = {"ev": "first_step", "step": 1}
JOINED = {"ev": "joined"}
DONE = {"ev": "done", "step": 9}


def saving(number):
    return {"ev": "saving", "step": number}


def saved(number):
    return {"ev": "saved", "step": number, "path": "p"}


def alarms(events, until_s, config=CONFIG, every_s=0.25):
    """(second, phase, suspicious or overdue) of everything told, looking four times a second."""
    dog, told, events, now_s = Watchdog(config, 0.0), [], list(events), 0.0
    while now_s <= until_s:
        while events and events[0][0] <= now_s:
            dog.observe(events[0][1], events[0][0])
            events.pop(0)
        told += [(now_s, alarm.phase, "overdue" if alarm.overdue else "suspicious") for alarm in dog.look(now_s)]
        now_s += every_s
    return told


@pytest.mark.parametrize(
    ("events", "name", "since_s", "limit_s"),
    [
        ([], "import", 0, 10),
        ([(3, phase("join"))], "join", 3, 20),
        ([(3, phase("join")), (4, JOINED), (4, phase("restore"))], "restore", 4, 30),
        ([(1, phase("compile"))], "compile", 1, 40),
        ([(1, phase("compile")), (5, phase("train"))], "first_step", 5, 50),
        ([(1, phase("train")), (2, FIRST_STEP)], "train", 2, 6),
        ([(1, phase("train")), (2, FIRST_STEP), (3, phase("evaluate"))], "evaluate", 3, 70),
        ([(1, phase("train")), (2, FIRST_STEP), (3, phase("save"))], "save", 3, 60),
        ([(1, phase("train")), (2, FIRST_STEP), (3, phase("finish"))], "finish", 3, 80),
        ([(1, phase("train")), (2, FIRST_STEP), (3, DONE)], "finish", 3, 80),
        ([(1, JOINED), (2, FIRST_STEP)], "train", 2, 6),
    ],
)
def test_every_phase_has_its_limit_and_is_suspicious_shortly_before(events, name, since_s, limit_s):
    told = alarms(events, since_s + 3 * limit_s)
    assert told == [(since_s + limit_s - 2, name, "suspicious"), (since_s + limit_s, name, "overdue")]


def test_an_alarm_says_how_long_it_waited():
    dog = Watchdog(CONFIG, 100.0)
    assert dog.look(111.5) == [
        Alarm(phase="import", limit_s=10, waited_s=11.5, overdue=False),
        Alarm(phase="import", limit_s=10, waited_s=11.5, overdue=True),
    ]


def test_a_heartbeat_is_progress_only_if_a_step_was_made():
    moving = [(2, FIRST_STEP), *((2 + number, step(1 + number)) for number in range(1, 20))]
    assert alarms(moving, 25) == []
    alive = [(2, FIRST_STEP), *((2 + number, step(1)) for number in range(1, 20))]
    assert alarms(alive, 20) == [(6, "train", "suspicious"), (8, "train", "overdue")]


def test_batches_that_were_skipped_are_progress():
    skipping = [(2, FIRST_STEP)]
    skipping += [(2 + number, {"ev": "heartbeat", "step": 1, "batch_index": 1 + number}) for number in range(1, 20)]
    assert alarms(skipping, 21) == []


def test_the_limit_of_a_step_follows_the_median_step():
    slow = [(2, FIRST_STEP), *((2 + 3 * number, step(1 + number)) for number in range(1, 6))]  # 3 s a step: limit 30 s
    assert alarms(slow, 100) == [(17 + 28, "train", "suspicious"), (17 + 30, "train", "overdue")]
    many_at_a_time = [(2, FIRST_STEP), *((2 + 3 * number, step(1 + 30 * number)) for number in range(1, 6))]  # 0.1 s a step
    assert alarms(many_at_a_time, 100) == [(17 + 4, "train", "suspicious"), (17 + 6, "train", "overdue")]


def test_an_evaluation_is_no_step():
    events = [(1, FIRST_STEP), (2, step(2)), (3, step(3)), (4, phase("evaluate")), (60, phase("train")), (61, step(4))]
    assert alarms(events, 100) == [(69, "train", "suspicious"), (71, "train", "overdue")]


def test_a_pause_is_no_step_whatever_few_steps_there_were():
    """Counted as one, the 58 s of an evaluation would be the median step, and a hang be found after ten minutes."""
    events = [(1, FIRST_STEP), (2, phase("evaluate")), (60, phase("train")), (61, step(2))]
    assert alarms(events, 100) == [(65, "train", "suspicious"), (67, "train", "overdue")]


def rolled_back(*replay):
    """Twenty steps, then back to the third, and what follows."""
    steps = [(1, FIRST_STEP), *((number, step(number)) for number in range(2, 21))]
    return [*steps, (21, phase("restore")), (22, phase("train")), *replay]


def test_steps_that_are_trained_again_after_a_rollback_are_progress():
    """The replay takes longer than a step may: who goes by the furthest step alone sees no progress in it."""
    assert alarms(rolled_back(*((20 + number, step(number)) for number in range(4, 40))), 60) == []


def test_a_hang_in_the_replay_is_found():
    assert alarms(rolled_back((24, step(4)), (25, step(5))), 60) == [(33, "train", "suspicious"), (35, "train", "overdue")]


def test_a_compilation_in_mid_training_has_its_own_limit():
    again = [(1, FIRST_STEP), (2, step(2)), (3, phase("compile")), (40, phase("train")), (41, step(3))]
    assert alarms(again, 46) == []
    assert alarms(again[:3], 50) == [(41, "compile", "suspicious"), (43, "compile", "overdue")]


def test_previews_are_no_step_and_have_a_limit_of_their_own():
    events = [(1, FIRST_STEP), (2, step(2)), (3, step(3)), (4, phase("preview"))]
    assert alarms([*events, (60, phase("train")), (61, step(4))], 66) == []
    assert alarms(events, 100) == [(77, "preview", "suspicious"), (79, "preview", "overdue")]


def test_a_trainer_that_tells_no_phases_is_not_watched_before_its_first_step():
    assert alarms([(1, phase("join")), (2, JOINED)], 5000, every_s=10) == []


def test_a_stuck_save_is_found_beside_the_steps():
    steps = [(1 + number, step(1 + number)) for number in range(1, 100)]
    events = sorted([(1, FIRST_STEP), *steps, (10, saving(9)), (11, saved(9)), (20, saving(19))], key=lambda each: each[0])
    assert alarms(events, 95) == [(78, "save", "suspicious"), (80, "save", "overdue")]


@pytest.mark.parametrize("end", [saved(9), {"ev": "save_failed", "step": 9, "error": "full"}])
def test_a_save_that_ends_is_none_that_is_stuck(end):
    steps = [(1 + number, step(1 + number)) for number in range(1, 200)]
    events = sorted([(1, FIRST_STEP), *steps, (10, saving(9)), (65, end)], key=lambda each: each[0])
    assert alarms(events, 150) == []


def test_a_state_that_waits_for_its_storage_is_no_hang_and_each_try_to_save_it_has_the_limit_of_a_save():
    end = {"ev": "save_failed", "step": 9, "error": "no room"}
    events = [(1, FIRST_STEP), (2, saving(9)), (3, end), (3, phase("hold")), (2000, phase("save")), (2000, saving(9))]
    assert alarms([*events, (2050, end), (2050, phase("hold"))], 4000, every_s=1) == []
    assert alarms(events, 2061, every_s=1)[-1] == (2060, "save", "overdue")


def test_a_loop_that_waits_for_a_save_may_wait_as_long_as_the_save():
    events = [(1, FIRST_STEP), (2, step(2)), (3, saving(2)), (50, saved(2)), (55, step(3))]
    assert alarms(events, 58) == []


def test_a_hang_during_a_save_is_found_when_the_save_is_over():
    events = [(1, FIRST_STEP), (2, step(2)), (3, saving(2)), (4, saved(2))]
    assert alarms(events, 30) == [(12, "train", "suspicious"), (14, "train", "overdue")]


def test_each_phase_is_reported_once_per_generation():
    events = [(1, FIRST_STEP), (20, phase("evaluate")), (21, phase("train")), (40, phase("evaluate")), (41, phase("train"))]
    told = [(at_s, "train", what) for at_s, what in ((5, "suspicious"), (7, "overdue"), (25, "suspicious"), (45, "suspicious"))]
    assert alarms(events, 300) == told


def test_going_on_ends_the_suspicion():
    dog = Watchdog(CONFIG, 0.0)
    assert not dog.suspicious(7.9)
    assert dog.suspicious(8.0)
    dog.observe(phase("join"), 9.0)
    assert not dog.suspicious(9.0)


def test_stacks_of_a_short_limit_are_taken_at_its_half():
    config = WatchdogConfig(import_s=2, stacks_before_s=30).limits()
    assert alarms([], 10, config) == [(1, "import", "suspicious"), (2, "import", "overdue")]


def test_when_to_look_next():
    dog = Watchdog(CONFIG, 0.0)
    assert dog.next_look_s(3.0) == 5.0
    dog.look(8.0)
    assert dog.next_look_s(8.0) == 2.0
    dog.look(10.0)
    assert dog.next_look_s(10.0) == float("inf")
    dog.observe(phase("join"), 11.0)
    assert dog.next_look_s(30.0) == 0.0
    dog.observe(JOINED, 31.0)
    assert dog.next_look_s(31.0) == float("inf")


def test_limits_are_checked_all_at_once():
    message = "join_s = 0: expected more than 0\nstep_factor = -1: expected more than 0"
    with pytest.raises(ValueError, match=re.escape(message)):
        WatchdogConfig(join_s=0, step_factor=-1)


@pytest.mark.parametrize(
    ("events", "limited"),
    [
        ([], True),
        ([JOINED], False),
        ([JOINED, phase("a phase of one's own")], False),
        ([JOINED, FIRST_STEP], True),
        ([JOINED, saving(3)], True),
        ([JOINED, saving(3), saved(3)], False),
        ([JOINED, DONE], True),
    ],
)
def test_a_trainer_that_reports_nothing_has_no_limit_but_that_of_silence(events, limited):
    dog = Watchdog(CONFIG, 0.0)
    for each in events:
        dog.observe(each, 1.0)
    assert dog.limited is limited


def test_silence_may_have_no_limit():
    assert WatchdogConfig(silent_s=None).silent_s is None
    with pytest.raises(ValueError, match="silent_s = 0: expected more than 0"):
        WatchdogConfig(silent_s=0)


def test_another_batch_of_an_evaluation_is_progress_and_the_same_one_is_not():
    def at(number):
        return {"ev": "heartbeat", "step": 1, "batch_index": 1, "evaluated_batches": number}

    long = [(1, FIRST_STEP), (3, phase("evaluate")), *((3 + 50 * number, at(number)) for number in range(1, 6))]
    assert alarms(long, 253 + 60) == []
    stuck = [(1, FIRST_STEP), (3, phase("evaluate")), (20, at(1)), (40, at(1))]
    assert alarms(stuck, 100) == [(20 + 68, "evaluate", "suspicious"), (20 + 70, "evaluate", "overdue")]
