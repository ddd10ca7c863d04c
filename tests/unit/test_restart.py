import dataclasses
import json

import pytest

from orchestrator.failures import FailureKind, PostMortem, classify
from orchestrator.restart import GiveUp, PastFailure, Restart, RestartPolicy, backoff_s, decide, past_failure, since_progress

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
        FailureKind.DATA_ERROR,
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


def test_progress_in_between_does_not_excuse_the_same_error_at_the_same_step():
    assert isinstance(decide([user(checkpoint_step=3), user(checkpoint_step=6)], POLICY), GiveUp)


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


def desync(step=7, message="host 1 at 8"):
    return PastFailure(kind=FailureKind.DESYNC, step=step, exception=("DesyncError", message))


def test_hosts_out_of_step_twice_at_the_same_step_give_up_whoever_it_was():
    assert decide([desync()], POLICY) == Restart(0.0)
    assert decide([desync(), desync(message="host 0 at 8")], POLICY).reason == (
        "the same desync at step 7 twice in a row: it would happen for ever"
    )
    assert isinstance(decide([desync(), desync(step=9)], POLICY), Restart)


def test_addresses_in_messages_do_not_make_them_different():
    history = [user(message="bad <object at 0x7f01>"), user(message="bad <object at 0x7fee>")]
    assert isinstance(decide(history, POLICY), GiveUp)


def test_an_error_that_calls_itself_deterministic_is_not_tried_again():
    assert "cannot go away" in decide([user(deterministic=True)], POLICY).reason


def test_past_failure_of_a_classified_one():
    exception = {"type": "ValueError", "message": "boom", "kind": "user", "step": 7, "deterministic": True}
    failure = classify([PostMortem(host=0, exception=exception, last_step=7)])
    assert past_failure(failure, 5) == user(deterministic=True, checkpoint_step=5)
    assert past_failure(classify([], {1}), None) == PastFailure(kind=FailureKind.HOST_LOST)
    placed = past_failure(classify([], {1}), None, seat=3, node_id="abc", at_s=9.0)
    assert (placed.seat, placed.node_id, placed.at_s) == (3, "abc", 9.0)


def test_a_past_failure_survives_json_also_from_a_document_that_knew_less():
    past = user(deterministic=True, checkpoint_step=5, seat=1, node_id="abc", at_s=9.0)
    data = json.loads(json.dumps(dataclasses.asdict(past)))
    assert PastFailure.from_dict(data) == past
    older = {name: data[name] for name in ("kind", "step", "exception", "deterministic", "checkpoint_step")}
    assert PastFailure.from_dict(older) == user(deterministic=True, checkpoint_step=5)
    assert PastFailure.from_dict({**older, "exception": None, "unheard_of": 1}).exception is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_failures": -1}, "max_failures = -1: expected 0 or more"),
        ({"backoff_initial_s": 9, "backoff_max_s": 3}, "backoff_initial_s = 9, backoff_max_s = 3: expected 0 <="),
    ],
)
def test_policy_rejects(values, message):
    with pytest.raises(ValueError, match=message):
        RestartPolicy(**values)
