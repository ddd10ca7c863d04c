import json
import signal

import pytest

from orchestrator.failures import FailureKind, PostMortem, classify, read_post_mortem

GLOO = {"type": "JaxRuntimeError", "message": "UNKNOWN: Gloo AllGather failed: Connection closed by peer", "kind": "collateral"}


def raised(kind, message="no", step=7, **more):
    return {"type": "ValueError", "message": message, "kind": kind, "step": step, "traceback": "...", **more}


def alive(host):
    return PostMortem(host=host, last_step=7)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("user", FailureKind.USER_ERROR),
        ("data", FailureKind.DATA_ERROR),
        ("non_finite", FailureKind.NON_FINITE),
        ("out_of_memory", FailureKind.OUT_OF_MEMORY),
        ("storage", FailureKind.STORAGE_ERROR),
        ("crash", FailureKind.PROCESS_CRASH),
    ],
)
def test_exception_says_its_kind_and_its_victims_are_set_aside(kind, expected):
    culprit = PostMortem(host=1, exit_code=1, exception=raised(kind), last_step=7, failed_at_s=10.0)
    victim = PostMortem(host=0, exit_code=1, exception=GLOO, failed_at_s=9.9)
    failure = classify([victim, culprit])
    assert (failure.kind, failure.host, failure.collateral) == (expected, 1, (0,))
    assert failure.summary == "host 1: ValueError at step 7: no"


def killed(host, number, at_s=10.0):
    return PostMortem(host=host, signal=number, last_step=7, failed_at_s=at_s)


CASES = {
    "host 1 killed, host 0 loses its peer": (
        [PostMortem(host=0, exception=GLOO, failed_at_s=10.1), killed(1, signal.SIGKILL)],
        (),
        (FailureKind.PROCESS_CRASH, 1, (0,)),
    ),
    "the coordinator's process killed, the others abort (their clocks are ahead)": (
        [killed(0, signal.SIGKILL, 10.0), killed(1, signal.SIGABRT, 9.0), killed(2, signal.SIGABRT, 10.1)],
        (),
        (FailureKind.PROCESS_CRASH, 0, (1, 2)),
    ),
    "an agent is lost, and its process with it": (
        [PostMortem(host=0, exception=GLOO, failed_at_s=10.0), killed(1, signal.SIGKILL)],
        {1},
        (FailureKind.HOST_LOST, 1, (0,)),
    ),
    "an agent is lost without a post-mortem": (
        [PostMortem(host=0, exception=GLOO, failed_at_s=10.0)],
        {1},
        (FailureKind.HOST_LOST, 1, (0,)),
    ),
    "an exception came before the agent went": (
        [alive(0), PostMortem(host=1, exception=raised("out_of_memory"), agent_lost=True)],
        {1},
        (FailureKind.OUT_OF_MEMORY, 1, ()),
    ),
    "two hosts fail by themselves: the earlier one": (
        [killed(0, signal.SIGSEGV, 11.0), killed(1, signal.SIGKILL, 10.0)],
        (),
        (FailureKind.PROCESS_CRASH, 1, ()),
    ),
    "one abort explains the lost connections; nothing explains it": (
        [PostMortem(host=0, exception=GLOO, failed_at_s=9.9), killed(1, signal.SIGABRT)],
        (),
        (FailureKind.PROCESS_CRASH, 1, (0,)),
    ),
    "an abort alone": ([alive(0), killed(1, signal.SIGABRT)], (), (FailureKind.PROCESS_CRASH, 1, ())),
    "all abort": (
        [killed(0, signal.SIGABRT), killed(1, signal.SIGABRT)],
        (),
        (FailureKind.COORDINATOR_LOST, None, (0, 1)),
    ),
    "all lose their connections": (
        [PostMortem(host=0, exception=GLOO), PostMortem(host=1, exception=GLOO)],
        (),
        (FailureKind.COORDINATOR_LOST, None, (0, 1)),
    ),
    "ended by SIGTERM": ([alive(0), killed(1, signal.SIGTERM)], (), (FailureKind.PREEMPTION, 1, ())),
    "status 0 before training was done": ([PostMortem(host=0, exit_code=0), alive(1)], (), (FailureKind.PROCESS_CRASH, 0, ())),
    "a host that was done is no failure": (
        [PostMortem(host=0, exit_code=0, done=True, failed_at_s=9.0), PostMortem(host=1, exit_code=3, failed_at_s=10.0)],
        (),
        (FailureKind.PROCESS_CRASH, 1, ()),
    ),
    "nothing is known": ([alive(0), alive(1)], (), (FailureKind.COORDINATOR_LOST, None, ())),
}


@pytest.mark.parametrize("name", CASES)
def test_classify(name):
    post_mortems, agent_lost, expected = CASES[name]
    for order in (post_mortems, post_mortems[::-1]):
        failure = classify(order, agent_lost)
        assert (failure.kind, failure.host, failure.collateral) == expected
        json.dumps(failure.evidence)


def test_evidence_says_what_is_known():
    failure = classify([PostMortem(host=1, signal=9, last_step=40, log_tail=("a", "b")), killed(2, signal.SIGSEGV)])
    assert failure.evidence["summary"] == "host 1: training process ended by SIGKILL at step 40"
    assert failure.evidence["signal"] == "SIGKILL"
    assert "out-of-memory killer" in failure.evidence["hint"]
    assert failure.evidence["log_tail"] == ["a", "b"]
    assert failure.evidence["also_failed"] == [2]
    assert (failure.step, failure.exception) == (40, None)


def test_lost_agent_gets_no_hint_about_memory():
    failure = classify([killed(1, signal.SIGKILL)], {1})
    assert failure.summary == "host 1: its agent is gone at step 7 (machine, node or agent process lost)"
    assert "hint" not in failure.evidence


def test_read_post_mortem_of_a_process_that_died():
    halted = {
        "exit": {"code": None, "signal": 9, "log_tail": ["bye"], "t": 12.0, "pid": 1},
        "last_heartbeat": {"step": 41},
        "exception": None,
    }
    dead = read_post_mortem(1, halted)
    assert dead == PostMortem(host=1, signal=9, last_step=41, failed_at_s=12.0, log_tail=("bye",))
    assert dead.exited
    assert dead.failed


def test_read_post_mortem_of_an_exception_prefers_its_step_and_time():
    halted = {"exit": {"code": 1, "signal": None, "t": 13.0}, "last_heartbeat": {"step": 41}, "exception": raised("user", t=12.0)}
    dead = read_post_mortem(0, halted)
    assert (dead.last_step, dead.failed_at_s, dead.exit_code) == (7, 12.0, 1)


def test_read_post_mortem_of_a_process_we_killed_and_of_a_lost_agent():
    assert not read_post_mortem(0, {"exit": None, "last_heartbeat": {"step": 3}, "exception": None}).failed
    assert read_post_mortem(0, None).agent_lost
