import json
import signal

import pytest

from orchestrator.failures.classify import FailureKind, PostMortem, classify, read_post_mortem

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
        ("device", FailureKind.DEVICE_ERROR),
        ("runtime", FailureKind.RUNTIME_ERROR),
        ("transient", FailureKind.TRANSIENT_ERROR),
    ],
)
def test_exception_says_its_kind_and_its_victims_are_set_aside(kind, expected):
    culprit = PostMortem(host=1, exit_code=1, exception=raised(kind), last_step=7, failed_at_s=10.0)
    victim = PostMortem(host=0, exit_code=1, exception=GLOO, failed_at_s=9.9)
    failure = classify([victim, culprit])
    assert (failure.kind, failure.host, failure.collateral) == (expected, 1, (0,))
    what = "a device failed" if kind == "device" else "ValueError"
    assert failure.summary == f"host 1: {what} at step 7: no"


def killed(host, number, at_s=10.0):
    return PostMortem(host=host, signal=number, last_step=7, failed_at_s=at_s)


NOTICE = {"t": 5.0, "ev": "notice", "reason": "maintenance", "deadline_s": 30.0, "node": True}
NO_ANSWER = {"type": "CoordinatorError", "message": "no answer from host 2 on 'done' within 300 s", "kind": "collateral"}
WAITS = (
    'Thread 7 (idle): "MainThread"\n    wait_for_device (trainers/parallel/platform.py:13)\n'
    "    read (trainers/loop/inflight.py:37)\n    run (trainers/loop/train_loop.py:90)\n"
)
SLEEPS = 'Thread 7 (idle): "MainThread"\n    sleep_forever (my_callbacks.py:13)\n    run (trainers/loop/train_loop.py:95)\n'


NO_LINK = {"type": "JaxRuntimeError", "message": "INTERNAL: NCCL operation failed: unhandled system error", "kind": "link"}
ECC = "F0522 10:59 pjrt.cc:3067] Non-OK-status: INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"


def overdue(host, **more):
    event = {"t": 20.0, "ev": "overdue", "phase": "train", "limit_s": 3.0, "waited_s": 3.04}
    return PostMortem(host=host, overdue=event, failed_at_s=20.0 - 3.04, last_step=7, **more)


def out_of_step(host, batches):
    return PostMortem(host=host, exception=raised("desync", batch_indices=batches), last_step=7)


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
    "a host is lost while the others wait too long": (
        [overdue(0), PostMortem(host=1, agent_lost=True)],
        {1},
        (FailureKind.HOST_LOST, 1, ()),
    ),
    "a process dies while the others wait too long": (
        [overdue(0), killed(1, signal.SIGKILL)],
        (),
        (FailureKind.PROCESS_CRASH, 1, ()),
    ),
    "a lost connection after a limit had passed": (
        [overdue(0, stacks=WAITS), PostMortem(host=1, exception=GLOO), overdue(2, stacks=SLEEPS)],
        (),
        (FailureKind.HANG, 2, (0, 1)),
    ),
    "a crash of a machine that had given notice": (
        [alive(0), PostMortem(host=1, signal=9, failed_at_s=10.0, notice=NOTICE)],
        (),
        (FailureKind.PREEMPTION, 1, ()),
    ),
    "a machine lost that had given notice": (
        [PostMortem(host=0, exception=GLOO, failed_at_s=9.0), PostMortem(host=1, agent_lost=True, notice=NOTICE)],
        (),
        (FailureKind.PREEMPTION, 1, (0,)),
    ),
    "a user's error on a machine that had given notice": (
        [alive(0), PostMortem(host=1, exception=raised("user"), notice=NOTICE)],
        (),
        (FailureKind.USER_ERROR, 1, ()),
    ),
    "a crash while another machine had given notice": (
        [PostMortem(host=0, notice=NOTICE), killed(1, signal.SIGKILL)],
        (),
        (FailureKind.PROCESS_CRASH, 1, ()),
    ),
    "all give up waiting for the one that is left": (
        [PostMortem(host=0, exception=NO_ANSWER), PostMortem(host=1, exception=NO_ANSWER), alive(2)],
        (),
        (FailureKind.HANG, 2, (0, 1)),
    ),
    "the coordinator's process is frozen, the others abort": (
        [PostMortem(host=0, state="T (stopped)"), killed(1, signal.SIGABRT), killed(2, signal.SIGABRT)],
        (),
        (FailureKind.HANG, 0, (1, 2)),
    ),
    "one of two is frozen, the other one aborts": (
        [killed(0, signal.SIGABRT), PostMortem(host=1, state="T (stopped)")],
        (),
        (FailureKind.HANG, 1, (0,)),
    ),
    "one gives up waiting, two are left": (
        [PostMortem(host=0, exception=NO_ANSWER), alive(1), alive(2)],
        (),
        (FailureKind.COORDINATOR_LOST, None, (0,)),
    ),
    "a device fails and the runtime aborts the process, before the others abort": (
        [killed(0, signal.SIGABRT, 9.0), PostMortem(host=1, signal=signal.SIGABRT, log_tail=("step 7", ECC), failed_at_s=10.0)],
        (),
        (FailureKind.DEVICE_ERROR, 1, (0,)),
    ),
    "one host has no link to the others": (
        [PostMortem(host=0, exception=GLOO, failed_at_s=9.0), PostMortem(host=1, exception=NO_LINK, failed_at_s=10.0)],
        (),
        (FailureKind.DEVICE_ERROR, 1, (0,)),
    ),
    "no host has a link to the others": (
        [PostMortem(host=0, exception=NO_LINK), PostMortem(host=1, exception=NO_LINK)],
        (),
        (FailureKind.COORDINATOR_LOST, None, (0, 1)),
    ),
    "a lost link is the consequence of a death": (
        [PostMortem(host=0, exception=NO_LINK, failed_at_s=9.0), killed(1, signal.SIGKILL)],
        (),
        (FailureKind.PROCESS_CRASH, 1, (0,)),
    ),
    "an error of the runtime that does not say why, and a death, with clocks that differ": (
        [PostMortem(host=0, exception=raised("runtime"), failed_at_s=9.9), killed(1, signal.SIGKILL, 10.0)],
        (),
        (FailureKind.PROCESS_CRASH, 1, ()),
    ),
    "a device error on a machine that had given notice": (
        [alive(0), PostMortem(host=1, exception=raised("device"), notice=NOTICE)],
        (),
        (FailureKind.PREEMPTION, 1, ()),
    ),
    "all find a loss spike": (
        [PostMortem(host=host, exception=raised("loss_spike"), last_step=7) for host in range(3)],
        (),
        (FailureKind.LOSS_SPIKE, None, ()),
    ),
    "three are out of step, one of them alone": (
        [out_of_step(host, [7, 8, 7]) for host in range(3)],
        (),
        (FailureKind.DESYNC, 1, ()),
    ),
    "three are out of step, and one lives to tell": (
        [killed(0, signal.SIGABRT), PostMortem(host=1, exception=GLOO), out_of_step(2, [7, 8, 7])],
        (),
        (FailureKind.DESYNC, 1, (0, 1)),
    ),
    "three are out of step, and nobody has heard all": (
        [out_of_step(host, None) for host in range(3)],
        (),
        (FailureKind.DESYNC, None, ()),
    ),
    "two are out of step": ([out_of_step(0, [7, 8]), out_of_step(1, [7, 8])], (), (FailureKind.DESYNC, None, ())),
    "out of step, all at different batches": (
        [out_of_step(0, [7, 9, 8]), PostMortem(host=1, exception=GLOO), out_of_step(2, None)],
        (),
        (FailureKind.DESYNC, None, (1,)),
    ),
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


def test_what_an_aborted_process_printed_of_its_device_is_reported():
    failure = classify([PostMortem(host=1, signal=6, last_step=40, log_tail=("step 40", ECC))])
    assert failure.summary == f"host 1: a device failed at step 40: {ECC}"


def test_lost_agent_gets_no_hint_about_memory():
    failure = classify([killed(1, signal.SIGKILL)], {1})
    assert failure.summary == "host 1: its agent is gone at step 7 (machine, node or agent process lost)"
    assert "hint" not in failure.evidence


def test_read_post_mortem_of_a_process_that_died():
    halted = {
        "exit": {"code": None, "signal": 9, "log_tail": ["bye"], "t": 12.0, "pid": 1},
        "last_heartbeat": {"step": 41},
        "exception": None,
        "clock_s": 12.5,
    }
    dead = read_post_mortem(1, halted, 1000.0)
    assert dead == PostMortem(host=1, signal=9, last_step=41, failed_at_s=999.5, log_tail=("bye",))
    assert dead.exited
    assert dead.failed


def test_read_post_mortem_of_an_exception_prefers_its_step_and_time():
    halted = {"exit": {"code": 1, "signal": None, "t": 13.0}, "last_heartbeat": {"step": 41}, "exception": raised("user", t=12.0)}
    halted["clock_s"] = 3615.0
    dead = read_post_mortem(0, halted, 15.0)
    assert (dead.last_step, dead.failed_at_s, dead.exit_code) == (7, -3588.0, 1)


def test_read_post_mortem_of_a_process_we_killed_and_of_a_lost_agent():
    assert not read_post_mortem(0, {"exit": None, "last_heartbeat": {"step": 3}, "exception": None}, 0.0).failed
    assert read_post_mortem(0, None, 0.0).agent_lost
    lost = read_post_mortem(2, None, 0.0, done=True, notice=NOTICE)
    assert lost == PostMortem(host=2, agent_lost=True, done=True, notice=NOTICE)


def test_a_broken_device_is_looked_for_only_where_the_runtime_aborted_the_process():
    log = ("step 7", ECC)
    assert PostMortem(host=0, signal=signal.SIGABRT, log_tail=log).broken_device == ECC
    assert PostMortem(host=0, log_tail=log).broken_device is None
    assert PostMortem(host=0, exit_code=1, exception=raised("user"), log_tail=log).broken_device is None


@pytest.mark.parametrize(
    "name", ["one host has no link to the others", "one abort explains the lost connections; nothing explains it"]
)
def test_a_single_cause_is_described(name):
    post_mortems, lost, _ = CASES[name]
    failure = classify(post_mortems, lost)
    assert failure.summary.startswith(f"host {failure.host}: ")


def test_a_hang_names_the_host_that_the_others_wait_for_and_its_line():
    failure = classify([overdue(0, stacks=WAITS), overdue(1, stacks=SLEEPS, state="S (sleeping)"), overdue(2, stacks=WAITS)])
    assert (failure.kind, failure.host, failure.collateral) == (FailureKind.HANG, 1, (0, 2))
    assert failure.summary == "host 1 hangs in train: sleep_forever (my_callbacks.py:13) (waited 3.0 s, limit 3 s)"
    assert failure.failed_at_s == pytest.approx(16.96)
    about = {name: failure.evidence[name] for name in ("phase", "limit_s", "waited_s", "line", "user_line", "why", "step")}
    assert about == {
        "phase": "train",
        "limit_s": 3.0,
        "waited_s": 3.04,
        "line": "sleep_forever (my_callbacks.py:13)",
        "user_line": "sleep_forever (my_callbacks.py:13)",
        "why": "it waits for no other host",
        "step": 7,
    }
    assert [group["hosts"] for group in failure.evidence["groups"]] == [[0, 2], [1]]
    assert "MainThread" not in json.dumps(failure.evidence)


def test_a_frozen_process_is_a_hang_where_it_stood():
    failure = classify([overdue(0, stacks=WAITS), PostMortem(host=1, stacks=WAITS, state="T (stopped)", last_step=7)])
    assert (failure.kind, failure.host) == (FailureKind.HANG, 1)
    assert failure.summary == (
        "host 1 hangs in train: read (trainers/loop/inflight.py:37), frozen in state T (stopped) (waited 3.0 s, limit 3 s)"
    )


def test_a_hang_in_which_nobody_stands_out_tells_where_all_are():
    failure = classify([overdue(0, stacks=WAITS), overdue(1, stacks=WAITS)])
    assert failure.host is None
    assert failure.summary == (
        "the hosts hang in train and no single host could be identified: "
        "hosts 0, 1 at read (trainers/loop/inflight.py:37) (waited 3.0 s, limit 3 s)"
    )


def test_a_hang_without_stacks_says_so():
    failure = classify([overdue(0), overdue(1)])
    assert (failure.kind, failure.host) == (FailureKind.HANG, None)
    assert "their stacks do not tell where" in failure.summary


def test_a_host_that_was_done_does_not_hang():
    event = {"t": 20.0, "ev": "overdue", "phase": "finish", "limit_s": 3.0, "waited_s": 3.0}
    failure = classify([PostMortem(host=0, done=True, overdue=event), overdue(1, stacks=SLEEPS), overdue(2, stacks=WAITS)])
    assert (failure.kind, failure.host, failure.collateral) == (FailureKind.HANG, 1, (2,))


def test_the_one_that_the_others_gave_up_waiting_for_is_reported_with_its_line():
    failure = classify([PostMortem(host=0, exception=NO_ANSWER), PostMortem(host=1, stacks=SLEEPS, state="S (sleeping)")])
    assert failure.summary == ("host 1 hangs at sleep_forever (my_callbacks.py:13): no answer from host 2 on 'done' within 300 s")


def test_hosts_out_of_step_are_all_reported():
    failure = classify([out_of_step(host, [7, 8, 7]) for host in range(3)])
    assert failure.summary == (
        "the hosts are out of step: host 1 has skipped or repeated a step "
        "(host 0 at batch 7, host 1 at batch 8, host 2 at batch 7)"
    )
    assert failure.step == 7


def test_a_preemption_says_what_was_announced_and_what_happened():
    failure = classify([alive(0), PostMortem(host=1, signal=9, last_step=7, notice=NOTICE)])
    assert failure.summary == (
        "host 1 was preempted, as announced (maintenance); host 1: training process ended by SIGKILL at step 7"
    )
    assert failure.evidence["notice"] == NOTICE


def test_a_failure_began_with_the_first_that_failed():
    failure = classify([PostMortem(host=0, exception=GLOO, failed_at_s=9.9), killed(1, signal.SIGKILL, 10.0)])
    assert failure.failed_at_s == 9.9
    assert classify([], {1}).failed_at_s is None


def test_read_post_mortem_of_a_process_that_hung():
    event = {"t": 20.0, "ev": "overdue", "phase": "train", "limit_s": 3.0, "waited_s": 3.5, "stacks": "late", "state": "S"}
    halted = {"exit": None, "exception": None, "last_heartbeat": {"step": 41}, "overdue": event, "notice": None, "clock_s": 20.0}
    dead = read_post_mortem(2, {**halted, "stacks": None, "state": None, "batch_index": 43}, 20.0)
    assert (dead.last_step, dead.failed_at_s, dead.batch_index) == (41, 16.5, 43)
    assert (dead.stacks, dead.state, dead.hangs) == ("late", "S", True)
    assert read_post_mortem(2, {**halted, "stacks": "early", "state": "T (stopped)"}, 20.0).stacks == "early"


def test_a_notice_comes_from_the_agent_or_from_elsewhere():
    own = {"reason": "SIGTERM"}
    assert read_post_mortem(0, {"notice": own}, 0.0, notice=NOTICE).notice == own
    assert read_post_mortem(0, {"notice": None}, 0.0, notice=NOTICE).notice == NOTICE
    assert read_post_mortem(0, None, 0.0, notice=NOTICE).notice == NOTICE
