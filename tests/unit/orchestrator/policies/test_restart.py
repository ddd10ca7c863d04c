import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.failures.classify import Failure, FailureKind, PostMortem, classify
from orchestrator.failures.history import PastFailure, past_failure
from orchestrator.policies.restart import GiveUp, Restart, RestartPolicy, backoff_s, decide, since_progress

POLICY = RestartPolicy(max_failures=3, max_preemptions=5)


def crash(checkpoint_step=None, step=7):
    return PastFailure(kind=FailureKind.PROCESS_CRASH, step=step, checkpoint_step=checkpoint_step)


def preemption(checkpoint_step=None):
    return PastFailure(kind=FailureKind.PREEMPTION, checkpoint_step=checkpoint_step)


def user(step=7, message="boom", kind=FailureKind.USER_ERROR, **more):
    return PastFailure(kind=kind, step=step, exception=("ValueError", message), **more)


def test_first_restart_is_immediate_then_the_delay_doubles_to_its_limit():
    policy = RestartPolicy(max_failures=100)
    delays = [decide([crash()] * n, policy) for n in range(1, 10)]
    assert delays == [Restart(s) for s in (0, 1, 2, 4, 8, 16, 32, 60, 60)]
    assert backoff_s(5000, policy) == 60.0


def test_the_back_off_begins_and_ends_where_the_policy_says():
    policy = RestartPolicy(backoff_initial_s=3.0, backoff_max_s=20.0)
    assert [backoff_s(n, policy) for n in range(1, 6)] == [0.0, 3.0, 6.0, 12.0, 20.0]
    assert backoff_s(9, RestartPolicy(backoff_initial_s=0.0)) == 0.0


def test_gives_up_beyond_max_failures_without_progress():
    assert isinstance(decide([crash(10)] * 3, POLICY), Restart)
    assert decide([crash(10)] * 4, POLICY) == GiveUp(
        "4 failures without a new checkpoint in between (driver.restart.max_failures = 3)"
    )


def test_zero_failures_allowed_gives_up_at_once():
    assert isinstance(decide([crash()], RestartPolicy(max_failures=0)), GiveUp)


def test_a_new_checkpoint_resets_the_budget_and_the_delay():
    assert decide([crash(10)] * 3 + [crash(20)], POLICY) == Restart(0.0)
    assert decide([crash(step) for step in range(50)], POLICY) == Restart(0.0)


def test_falling_back_to_an_older_checkpoint_is_no_progress():
    history = [crash(20), crash(10), crash(20), crash(10)]
    assert since_progress(history) == history
    assert isinstance(decide(history, POLICY), GiveUp)


def test_no_checkpoint_at_all_is_no_progress():
    assert isinstance(decide([crash(None, step) for step in range(4)], POLICY), GiveUp)


def test_preemptions_have_their_own_budget():
    assert decide([crash(10)] * 3 + [preemption(10)], POLICY) == Restart(0.0)
    assert decide([preemption(10)] * 5 + [crash(10)], POLICY) == Restart(0.0)
    assert "6 preemptions" in decide([preemption(10)] * 6, POLICY).reason


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.USER_ERROR,
        FailureKind.NON_FINITE,
        FailureKind.LOSS_SPIKE,
        FailureKind.OUT_OF_MEMORY,
    ],
)
def test_the_same_error_at_the_same_step_twice_gives_up(kind):
    assert decide([user(kind=kind)], POLICY) == Restart(0.0)
    assert decide([user(kind=kind), user(kind=kind)], POLICY).reason == (
        f"the same {kind} at step 7 twice in a row: it would happen for ever"
    )


def test_the_same_error_after_a_new_checkpoint_is_tried_once_more():
    history = [user(checkpoint_step=3), user(checkpoint_step=6)]
    assert decide(history, POLICY) == Restart(0.0)
    assert isinstance(decide([*history, user(checkpoint_step=6)], POLICY), GiveUp)


def test_the_same_error_after_a_generation_that_trained_is_tried_once_more():
    assert isinstance(decide([user(generation=4), user(generation=5)], POLICY), GiveUp)
    # Generation 5 stopped for a resize: nothing had failed.
    assert isinstance(decide([user(generation=4), user(generation=6)], POLICY), Restart)


@pytest.mark.parametrize(
    "other", [user(step=8), user(message="other"), user(kind=FailureKind.DATA_ERROR), crash()], ids=lambda p: str(p)[:40]
)
def test_another_error_or_step_is_tried_again(other):
    assert isinstance(decide([other, user()], POLICY), Restart)
    assert isinstance(decide([user(), crash(), user()], POLICY), Restart)


def test_the_same_crash_twice_is_tried_again():
    assert isinstance(decide([crash(), crash()], POLICY), Restart)


def hang(checkpoint_step=None, step=7):
    return PastFailure(kind=FailureKind.HANG, step=step, checkpoint_step=checkpoint_step)


def test_a_hang_at_the_same_place_is_tried_again_within_the_budget():
    assert decide([hang(10), hang(10)], POLICY) == Restart(1.0)
    assert "4 failures" in decide([hang(10)] * 4, POLICY).reason


def hang_at(line, step=7, state="S (sleeping)", host=1):
    evidence = {"step": step, "state": state} | ({"user_line": line} if line else {})
    return past_failure(Failure(kind=FailureKind.HANG, host=host, evidence=evidence), None)


def test_a_hang_at_the_same_line_of_the_users_at_the_same_step_gives_up_as_an_error_does():
    at = hang_at("fetch (mine.py:9)")
    assert decide([at], POLICY) == Restart(0.0)
    assert decide([at, at], POLICY).reason == (
        "the same hang at step 7 twice in a row: it would happen for ever (if it is only slow there, give it longer: "
        "driver.watchdog)"
    )
    for other in (hang_at("fetch (mine.py:9)", step=8), hang_at("load (mine.py:30)")):
        assert isinstance(decide([at, other], POLICY), Restart)
    for other in (
        hang_at(None),
        hang_at("fetch (mine.py:9)", state="D (disk sleep)"),  # the machine may be to blame
        hang_at("fetch (mine.py:9)", state="T (stopped)"),
        crash(),
    ):
        assert isinstance(decide([at, other], POLICY), Restart)
        assert isinstance(decide([other, at], POLICY), Restart)
        assert isinstance(decide([other, other], POLICY), Restart)


def desync(step=7, message="host 1 at 8"):
    return PastFailure(kind=FailureKind.DESYNC, step=step, exception=("DesyncError", message))


def test_hosts_out_of_step_twice_at_the_same_step_give_up_whoever_it_was():
    assert decide([desync()], POLICY) == Restart(0.0)
    assert decide([desync(), desync(message="host 0 at 8")], POLICY).reason == (
        "the same desync at step 7 twice in a row: it would happen for ever"
    )
    assert isinstance(decide([desync(), desync(step=9)], POLICY), Restart)


def device(slot=1, node_id="a", step=7, kind=FailureKind.DEVICE_ERROR, **more):
    exception = ("JaxRuntimeError", "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    return PastFailure(kind=kind, step=step, exception=exception, slot=slot, node_id=node_id, **more)


@pytest.mark.parametrize("kind", [FailureKind.DEVICE_ERROR, FailureKind.RUNTIME_ERROR])
def test_an_error_of_a_device_is_the_programs_if_another_machine_has_it_at_the_same_step(kind):
    first = device(kind=kind)
    assert decide([first], POLICY) == Restart(0.0)
    assert decide([first, first], POLICY) == Restart(1.0)
    for other in (device(slot=2, node_id="b", kind=kind), device(node_id="b", kind=kind), device(slot=2, kind=kind)):
        assert decide([first, other], POLICY).reason == f"the same {kind} at step 7 twice in a row: it would happen for ever"
    assert isinstance(decide([first, device(2, "b", step=9, kind=kind)], POLICY), Restart)
    assert isinstance(decide([first, device(None, None, kind=kind)], POLICY), Restart)


# ---------------------------------------------------------------------- starts that fail


def start(at_s=0.0, generation=None, kind=FailureKind.TRANSIENT_ERROR, message="no answer", **more):
    """A failure before the first step."""
    about = {"exception": ("ConnectionError", message), "trained": False, "step": 0, "at_s": at_s, "generation": generation}
    return PastFailure(kind=kind, **{**about, **more})


def trained(at_s=0.0, generation=None, step=50, **more):
    return PastFailure(kind=FailureKind.PROCESS_CRASH, step=step, trained=True, at_s=at_s, generation=generation, **more)


TIMED = RestartPolicy(max_failures=3, retry_for_s=1800)
MINUTES = [60.0 * minute for minute in range(40)]


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.TRANSIENT_ERROR,
        FailureKind.STORAGE_ERROR,
        FailureKind.USER_ERROR,
        FailureKind.DATA_ERROR,
        FailureKind.DEVICE_ERROR,
        FailureKind.PROCESS_CRASH,
        FailureKind.COORDINATOR_LOST,
    ],
)
def test_a_start_that_fails_is_tried_again_for_its_time_whatever_their_number(kind):
    history = [start(at_s, number, kind) for number, at_s in enumerate(MINUTES)]
    decisions = [decide(history[: n + 1], TIMED) for n in range(len(history))]
    assert decisions[0] == Restart(0.0, left_s=1800.0)
    assert decisions[29] == Restart(60.0, left_s=60.0)
    assert decisions[30] == GiveUp("it failed 31 times in 1800 s (driver.restart.retry_for_s = 1800)")


def test_without_a_time_a_start_that_fails_is_not_tried_again():
    assert decide([start()], RestartPolicy(retry_for_s=0)) == GiveUp("it failed once (driver.restart.retry_for_s = 0)")


def test_an_older_document_does_not_say_whether_it_trained():
    unknown = {"trained": None, "generation": None}
    history = [start(at_s, **unknown) for at_s in MINUTES]
    assert decide(history[:20], TIMED) == Restart(60.0, left_s=1800.0 - 19 * 60)
    assert isinstance(decide([crash(step=None)] * 4, TIMED), GiveUp)


def test_a_start_long_after_the_one_before_is_another_matter():
    """The two were equal, and 30 days of training lay between them: that was a final verdict."""
    day_s = 86_400.0
    for between in ([], [trained(30 * day_s, 5)]):
        history = [start(0.0, 4), *between, start(30 * day_s, 6, checkpoint_step=900)]
        assert decide(history, TIMED) == Restart(0.0, left_s=1800.0)


def test_waiting_for_machines_is_not_trying():
    """Nor is a clock that was set forward."""
    history = [start(0.0, 0), start(86_400.0, 1)]
    assert decide(history, TIMED) == Restart(1.0, left_s=1200.0)
    slow = [start(2400.0 * number, number) for number in range(4)]
    assert isinstance(decide(slow[:3], TIMED), Restart)
    assert isinstance(decide(slow, TIMED), GiveUp)


def test_a_clock_that_was_set_back_costs_nothing():
    assert decide([start(5000.0, 0), start(10.0, 1)], TIMED) == Restart(1.0, left_s=1800.0)


@pytest.mark.parametrize("kind", [FailureKind.TRANSIENT_ERROR, FailureKind.STORAGE_ERROR, FailureKind.DATA_ERROR])
def test_what_is_away_at_every_try_after_some_steps_has_both_a_number_and_a_time(kind):
    """A shard that is gone, a disk that is full: each time the steps up to it are trained again."""
    gone = [start(60.0 * n, n, kind, trained=True, step=700, checkpoint_step=600) for n in range(40)]
    assert decide(gone[:3], TIMED) == Restart(2.0)
    assert decide(gone[:20], TIMED) == Restart(60.0, left_s=1800.0 - 19 * 60)
    assert decide(gone[:31], TIMED).reason.startswith("31 failures without a new checkpoint in between")
    assert isinstance(decide(gone[:31], RestartPolicy(max_failures=100)), Restart)


def test_starts_that_fail_do_not_use_up_the_number_of_failures():
    history = [trained(0.0, 0), *(start(10.0 * n, n) for n in range(1, 9)), trained(100.0, 9), trained(110.0, 10)]
    assert decide(history, TIMED) == Restart(2.0)
    assert isinstance(decide([*history, trained(120.0, 11)], TIMED), GiveUp)


REPEATING = (FailureKind.USER_ERROR, FailureKind.RUNTIME_ERROR)


def mistake(generation, at_s=0.0, kind=FailureKind.USER_ERROR, message="no such name", **more):
    return start(at_s, generation, kind, message, mistake=True, **more)


@pytest.mark.parametrize(
    "kind", [FailureKind.USER_ERROR, FailureKind.DATA_ERROR, FailureKind.TRANSIENT_ERROR, FailureKind.RUNTIME_ERROR]
)
def test_a_mistake_before_anything_was_trained_is_reported_at_the_second_time(kind):
    """A TypeError, a wrong path, a program that the compiler refuses: within seconds, on whichever machine."""
    assert decide([mistake(0, kind=kind)], TIMED) == Restart(0.0, left_s=1800.0)
    assert decide([mistake(0, kind=kind), mistake(1, kind=kind)], TIMED).reason == (
        f"the same {kind} at the start twice in a row: "
        + ("it would happen for ever" if kind in REPEATING else "it looks like a mistake")
    )
    assert isinstance(decide([mistake(0, kind=kind), mistake(1, kind=kind, message="another")], TIMED), Restart)


@pytest.mark.parametrize("before", [[trained(0.0, 0)], []], ids=["one that failed", "one that was resized"])
@pytest.mark.parametrize("kind", [FailureKind.USER_ERROR, FailureKind.TRANSIENT_ERROR])
def test_what_looks_like_a_mistake_in_a_run_that_has_trained_is_a_mount_that_went_away(kind, before):
    history = [*before, *(mistake(1 + n, 60.0 * n, kind) for n in range(20))]
    assert isinstance(decide(history, TIMED), Restart)


def test_an_error_that_is_no_mistake_may_be_that_of_a_server_that_is_away():
    """Even where nothing was trained yet: a user's client raises what it likes."""
    assert decide([start(0.0, 0, FailureKind.USER_ERROR), start(3.0, 1, FailureKind.USER_ERROR)], TIMED) == Restart(1.0, 1797.0)


def test_an_error_at_the_step_that_the_one_before_had_reached():
    """The checkpoint is of that very step, so the second generation takes none."""
    reached = user(step=50, generation=3, trained=True, checkpoint_step=50)
    assert isinstance(decide([reached, user(step=50, generation=4, trained=False, checkpoint_step=50)], POLICY), GiveUp)


def test_a_run_that_loses_what_it_trains_is_reported_to_save_more_often():
    history = [trained(step=step, checkpoint_step=100) for step in (400, 900, 300, 500)]
    assert decide(history, TIMED).reason == (
        "4 failures without a new checkpoint in between (driver.restart.max_failures = 3); it got as far as step 900 and the "
        "newest checkpoint is of step 100: save more often (checkpoint.save_steps)"
    )
    never = decide([trained(step=step) for step in (400, 900, 300, 500)], TIMED).reason
    assert never.endswith("step 900 and there is no checkpoint: save more often (checkpoint.save_steps)")
    assert "save more often" not in decide([trained(step=100, checkpoint_step=100)] * 4, TIMED).reason
    one = dataclasses.replace(TIMED, max_failures=1)
    assert decide([trained(step=step) for step in (400, 900)], one).reason.endswith("save more often (checkpoint.save_steps)")
    none = dataclasses.replace(TIMED, max_failures=0)
    assert "save more often" not in decide([trained(step=400)], none).reason  # once is no pattern


# ---------------------------------------------------------------------- whatever happened

KINDS = st.sampled_from(list(FailureKind))
FAILURES = st.builds(
    PastFailure,
    kind=KINDS,
    step=st.none() | st.integers(0, 5),
    exception=st.none() | st.tuples(st.sampled_from(["A", "B"]), st.just("no")),
    mistake=st.booleans(),
    trained=st.none() | st.booleans(),
    checkpoint_step=st.none() | st.integers(0, 5),
    slot=st.none() | st.integers(0, 2),
    node_id=st.none() | st.sampled_from(["a", "b"]),
    at_s=st.none() | st.floats(0, 1e7),
)


def numbered(history):
    return [dataclasses.replace(past, generation=number) for number, past in enumerate(history)]


HISTORIES = st.lists(FAILURES, min_size=1, max_size=30) | st.lists(FAILURES, min_size=1, max_size=30).map(numbered)


@given(HISTORIES)
def test_a_deterministic_error_gives_up_at_once_whatever_came_before(history):
    assert isinstance(decide([*history, dataclasses.replace(history[-1], deterministic=True)], TIMED), GiveUp)


@given(HISTORIES)
def test_the_delay_is_never_longer_than_its_limit_and_the_first_is_none(history):
    decision = decide(history, TIMED)
    if isinstance(decision, Restart):
        assert 0 <= decision.delay_s <= TIMED.backoff_max_s
        assert decision.left_s is None or 0 < decision.left_s <= TIMED.retry_for_s
    lenient = RestartPolicy(max_failures=1, max_preemptions=1)
    assert decide(history[:1], lenient) == Restart(0.0, decide(history[:1], lenient).left_s)


@given(HISTORIES, st.lists(st.floats(0, 55), max_size=30))
def test_what_is_transient_is_tried_for_its_time_whatever_came_before(history, gaps_s):
    """Within half an hour; the delays grow."""
    checkpoint_step = max((past.checkpoint_step or 0 for past in history), default=0)
    times_s = itertools.accumulate(gaps_s, initial=1e7)
    starts = [start(at_s, 1000 + n, checkpoint_step=checkpoint_step) for n, at_s in enumerate(times_s)]
    decisions = [decide([*history, *starts[: n + 1]], TIMED) for n in range(len(starts))]
    assert all(isinstance(decision, Restart) for decision in decisions)
    delays = [decision.delay_s for decision in decisions]
    assert delays == sorted(delays)


@given(HISTORIES)
def test_failures_after_steps_without_a_checkpoint_come_to_an_end(history):
    crashes = [crash(checkpoint_step=0)] * 5
    assert any(isinstance(decide([*history, *crashes[: n + 1]], TIMED), GiveUp) for n in range(5))


@given(HISTORIES)
def test_starts_that_fail_for_ever_come_to_an_end(history):
    starts = [start(1e7 + 30.0 * n, 1000 + n) for n in range(62)]
    assert isinstance(decide([*history, *starts], TIMED), GiveUp)


def test_addresses_in_messages_do_not_make_them_different():
    history = [user(message="bad <object at 0x7f01>"), user(message="bad <object at 0x7fee>")]
    assert isinstance(decide(history, POLICY), GiveUp)


def test_nothing_is_trained_again_because_the_storage_has_not_taken_the_state():
    full = PastFailure(kind=FailureKind.STORAGE_ERROR, step=400, trained=True, deterministic=True, at_s=1.0)
    assert decide([full], TIMED) == GiveUp("the storage did not take the state: nothing is trained again because of that")
    assert isinstance(decide([dataclasses.replace(full, deterministic=False)], TIMED), Restart)


def test_an_error_that_calls_itself_deterministic_is_not_tried_again():
    assert "cannot go away" in decide([user(deterministic=True)], POLICY).reason


def test_past_failure_of_a_classified_one():
    exception = {"type": "ValueError", "message": "boom", "kind": "user", "step": 7, "deterministic": True, "mistake": True}
    failure = classify([PostMortem(host=0, exception=exception, last_step=7)])
    assert past_failure(failure, 5) == user(deterministic=True, mistake=True, checkpoint_step=5)
    told = past_failure(failure, 5, generation=3, trained=False)
    assert (told.generation, told.trained, told.took_steps) == (3, False, False)
    assert past_failure(classify([], {1}), None) == PastFailure(kind=FailureKind.HOST_LOST)
    placed = past_failure(classify([], {1}), None, slot=3, node_id="abc", at_s=9.0)
    assert (placed.slot, placed.node_id, placed.at_s) == (3, "abc", 9.0)


def test_a_past_failure_survives_json_also_from_a_document_that_knew_less():
    past = user(deterministic=True, checkpoint_step=5, slot=1, node_id="abc", at_s=9.0)
    data = json.loads(json.dumps(dataclasses.asdict(past)))
    assert PastFailure.from_dict(data) == past
    older = {name: data[name] for name in ("kind", "step", "exception", "deterministic", "checkpoint_step")}
    assert PastFailure.from_dict(older) == user(deterministic=True, checkpoint_step=5)
    assert PastFailure.from_dict({**older, "exception": None, "unheard_of": 1}).exception is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_failures": -1}, "max_failures = -1: expected 0 or more"),
        ({"retry_for_s": -1}, "retry_for_s = -1: expected 0 or more"),
        ({"backoff_initial_s": 9, "backoff_max_s": 3}, "backoff_initial_s = 9, backoff_max_s = 3: expected 0 <="),
    ],
)
def test_policy_rejects(values, message):
    with pytest.raises(ValueError, match=message):
        RestartPolicy(**values)
