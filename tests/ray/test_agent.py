"""The host agent with real processes, without Ray around it."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from unittest import mock

import psutil
import pytest

from cluster.agent import agent as agent_module
from cluster.agent import precompile as precompile_module
from cluster.agent import preemption
from cluster.agent import standby as standby_module
from cluster.agent import state as state_module
from cluster.agent.agent import HostAgent
from cluster.agent.driver_lease import StaleDriver
from gangway.wire.orders import OrderError
from tests.programs.processes import is_gone, wait_until

LONG_S = 60.0


@pytest.fixture
def start(tmp_path):
    agents = []

    def start(preparation=None, module="tests.programs.echo_worker", env=None, **options):
        agents.append(HostAgent(module, env or {}, str(tmp_path / "logs"), local_log_dir=str(tmp_path / "local"), **options))
        if preparation is not None:
            agents[-1].prepare(preparation)
        return agents[-1]

    yield start
    for agent in agents:
        agent.shutdown(driver_term=1000)


def events_until(agent, kind, cursor=0):
    """All events from `cursor` to the first of this kind."""
    found = []
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        answer = agent.poll(cursor, LONG_S)
        cursor = answer["cursor"]
        found += answer["events"]
        if any(event["ev"] == kind for event in found):
            return found
    raise AssertionError(f"no {kind} among {found}")


def event(agent, kind, cursor=0):
    return next(event for event in events_until(agent, kind, cursor) if event["ev"] == kind)


def state(agent):
    return agent.poll(0, 0)["host_state"]


def wait_for_standby(agent, how="warm"):
    assert wait_until(lambda: state(agent)["standby"] == how), state(agent)
    return state(agent)["standby_pid"]


def in_background(work):
    """A thread that does `work`, and the list that its answer comes into."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    return thread, answers


def test_a_standby_becomes_the_process_of_its_generation(start):
    agent = start({"tag": "a"})
    standby = wait_for_standby(agent)
    answer = agent.start({"generation": 7, "steps": 3})
    assert answer["pid"] == standby
    events = events_until(agent, "first_step")
    assert [each["ev"] for each in events] == ["phase", "warm", "joined", "first_step"]
    assert {each["generation"] for each in events} == {7}
    assert agent.poll(0, 0)["host_state"]["alive"]
    assert wait_until(lambda: (agent.poll(0, 0)["heartbeat"] or {}).get("step") == 3)
    assert agent.poll(0, 0)["heartbeat"]["generation"] == 7


def test_orders_reach_the_process(start):
    agent = start({})
    assert agent.order({"cmd": "echo", "message": "too early"}) is False
    agent.start({"generation": 0})
    assert agent.order({"cmd": "echo", "message": "hello"})
    assert event(agent, "note")["message"] == "hello"


def test_what_a_process_prints_is_reported_if_its_orders_ask_for_it(start):
    """Its last line, too, though the process ends at once after it."""
    agent = start({})
    agent.start({"generation": 0, "then": "raise", "shown_lines": 5})
    events = events_until(agent, "exception")
    assert [each["lines"] for each in events if each["ev"] == "printed"] == [["Traceback of boom"]]
    agent.halt()
    silent = agent.poll(0, 0)["cursor"]
    agent.start({"generation": 1, "then": "raise"})
    assert "printed" not in {each["ev"] for each in events_until(agent, "exit", silent)}


def test_the_process_has_the_environment_it_was_given(start, monkeypatch):
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "5")
    agent = start({}, env={"NAME": "value", "JAX_COMPILATION_CACHE_DIR": "~/cache"})
    agent.start({"generation": 0})
    env = event(agent, "joined")["env"]
    assert env["NAME"] == "value"
    assert env["JAX_COMPILATION_CACHE_DIR"] == os.path.expanduser("~/cache")
    assert "MEGASCALE_SLICE_ID" not in env


def test_a_poll_waits_for_an_event_and_no_longer(start):
    agent = start({})
    agent.start({"generation": 0})
    events_until(agent, "first_step")
    cursor = agent.poll(0, 0)["cursor"]
    assert agent.poll(cursor, 0.01)["events"] == []
    threading.Timer(0.2, agent.order, [{"cmd": "echo", "message": "now"}]).start()
    answer = agent.poll(cursor, LONG_S)
    assert [each["message"] for each in answer["events"]] == ["now"]
    assert agent.poll(answer["cursor"], 0)["events"] == []


def test_the_newest_events_are_kept_and_those_that_say_how_it_stands(start, monkeypatch):
    monkeypatch.setattr(state_module, "MAX_EVENTS", 8)
    agent = start({})
    agent.start({"generation": 0})
    for number in range(20):
        agent.order({"cmd": "echo", "message": number})
    assert wait_until(lambda: agent.poll(0, 0)["events"][-1].get("message") == 19)
    answer = agent.poll(0, 0)
    assert len(answer["events"]) <= 8
    assert [each["ev"] for each in answer["events"][:4]] == ["phase", "warm", "joined", "first_step"]
    numbers = [each["message"] for each in answer["events"][4:]]
    assert numbers == list(range(numbers[0], 20))
    assert answer["cursor"] == 24  # phase, warm, joined, first_step and the twenty


def test_an_exit_is_reported_with_the_last_lines_of_the_log(start):
    agent = start({})
    agent.start({"generation": 0, "then": "exit"})
    last = events_until(agent, "exit")[-1]
    assert (last["ev"], last["code"], last["signal"]) == ("exit", 3, None)
    assert last["log_tail"] == ["leaving"]


def test_an_exception_comes_before_the_exit(start):
    agent = start({})
    agent.start({"generation": 0, "then": "raise"})
    events = events_until(agent, "exit")
    assert [each["ev"] for each in events[-2:]] == ["exception", "exit"]
    after = agent.halt()
    assert after["exception"]["message"] == "boom"
    assert after["exit"]["code"] == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT, signal.SIGTERM])
def test_a_killed_process_is_reported_by_its_signal(start, how):
    agent = start({})
    pid = agent.start({"generation": 0})["pid"]
    cursor = events_until(agent, "first_step") and agent.poll(0, 0)["cursor"]
    threading.Timer(0.2, os.kill, [pid, how]).start()
    answer = agent.poll(cursor, LONG_S)
    assert [(each["ev"], each["signal"]) for each in answer["events"]] == [("exit", how)]
    assert agent.halt()["exit"]["signal"] == how


def test_halt_is_no_failure_and_ends_a_process_that_ignores_sigterm(start):
    agent = start({})
    pid = agent.start({"generation": 0, "ignore_sigterm": True, "steps": 2})["pid"]
    events_until(agent, "first_step")
    os.kill(pid, signal.SIGTERM)
    after = agent.halt()
    assert is_gone(pid)
    assert after["exit"] is None
    assert after["pid"] == pid
    assert [each for each in agent.poll(0, 0)["events"] if each["ev"] == "exit"] == []
    assert agent.halt() == {**after, "clock_s": mock.ANY}


def test_halt_tells_what_nobody_has_polled_yet(start):
    """A checkpoint that was complete just before the crash, say: the next generation would not know of it."""
    agent = start({})
    agent.start({"generation": 3})
    events_until(agent, "first_step")
    cursor = agent.poll(0, 0)["cursor"]
    agent.order({"cmd": "emit", "ev": "saved", "step": 7, "path": "p"})
    assert wait_until(lambda: agent.poll(0, 0)["cursor"] > cursor)
    after = agent.halt(cursor=cursor)
    assert [(each["ev"], each["n"], each["generation"]) for each in after["events"]] == [("saved", cursor, 3)]
    assert after["cursor"] == cursor + 1
    assert agent.halt(cursor=after["cursor"])["events"] == []
    assert "events" not in agent.halt()


def test_halt_ends_a_frozen_process(start):
    agent = start({})
    pid = agent.start({"generation": 0})["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert agent.halt()["exit"] is None
    assert is_gone(pid)


def test_a_process_that_died_just_before_halt_keeps_its_own_exit(start):
    agent = start({})
    pid = agent.start({"generation": 0})["pid"]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: is_gone(pid))
    assert agent.halt()["exit"]["signal"] == signal.SIGKILL


def test_a_process_that_takes_long_to_die_is_reported_and_the_next_generation_waits_for_its_end(start, monkeypatch):
    """One with a terabyte of memory, say; here something that it left behind holds its pipe open."""
    monkeypatch.setattr("cluster.agent.child_process._PIPE_GRACE_S", LONG_S)
    agent = start({})
    pid = agent.start({"generation": 0, "workers": 1, "apart": True})["pid"]
    (holder,) = event(agent, "joined")["workers"]
    cursor = events_until(agent, "first_step") and agent.poll(0, 0)["cursor"]
    for _ in range(2):
        after = agent.halt(0.05, cursor=cursor)
        assert (after["gone"], after["pid"], after["generation"], after["exit"], after["events"]) == (False, pid, 0, None, [])
        assert after["dying_s"] >= 0.05
        assert after["dying_state"]
        assert after["state"][0] in "SR"  # what it was at before it was killed
    assert agent.halt()["gone"] is False  # in its own time, too
    assert state(agent)["alive"]
    thread, answers = in_background(lambda: agent.start({"generation": 1}))
    assert wait_until(lambda: agent.take_over(0)["generation"] == 1)
    wait_for_standby(agent)
    assert not answers
    os.kill(holder, signal.SIGKILL)
    thread.join(LONG_S)
    assert answers[0]["pid"] != pid
    assert {each["generation"] for each in events_until(agent, "first_step")} == {1}
    assert agent.halt()["gone"] is True


def test_a_generation_does_not_wait_for_ever_for_a_process_that_will_not_die(start, monkeypatch):
    monkeypatch.setattr("cluster.agent.child_process._PIPE_GRACE_S", LONG_S)
    agent = start({})
    pid = agent.start({"generation": 0, "workers": 1, "apart": True})["pid"]
    (holder,) = event(agent, "joined")["workers"]
    agent.halt(0.05)
    with pytest.raises(TimeoutError, match=rf"generation 1: process {pid} of generation 0 is still there \d+ s after SIGKILL"):
        agent.start({"generation": 1, "limits": {"phases": {"import": 0.2}}})
    os.kill(holder, signal.SIGKILL)
    assert agent.halt(LONG_S)["gone"]


def test_halt_without_a_process(start):
    assert start({}).halt()["pid"] is None


@pytest.mark.parametrize("how", ["halt", "crash"])
def test_data_workers_end_with_their_process(start, how):
    agent = start({})
    pid = agent.start({"generation": 0, "workers": 2})["pid"]
    workers = event(agent, "joined")["workers"]
    assert not any(map(is_gone, workers))
    if how == "halt":
        agent.halt()
    else:
        os.kill(pid, signal.SIGKILL)
        event(agent, "exit")  # though the workers hold the event pipe open
    assert wait_until(lambda: all(map(is_gone, workers)))


def test_nothing_is_left_of_a_process_group(start):
    agent = start({})
    pid = agent.start({"generation": 0, "workers": 1})["pid"]
    event(agent, "joined")
    members = [each.pid for each in psutil.process_iter() if not is_gone(each.pid) and os.getpgid(each.pid) == pid]
    assert len(members) == 3  # the process, its worker, the guard
    agent.halt()
    assert wait_until(lambda: all(map(is_gone, members)))


def test_the_next_standby_waits_for_the_first_step(start):
    agent = start({})
    agent.start({"generation": 0, "steps": 0})
    event(agent, "joined")
    assert state(agent)["standby"] == "none"
    agent.halt()
    agent.start({"generation": 1, "steps": 1})
    wait_for_standby(agent)


def test_a_failed_process_gets_a_successor_at_once(start):
    agent = start({})
    agent.start({"generation": 0, "steps": 0, "then": "exit"})
    event(agent, "exit")
    wait_for_standby(agent)


def test_a_finished_process_gets_no_successor(start):
    agent = start({})
    agent.start({"generation": 0, "steps": 0, "then": "done"})
    assert event(agent, "exit")["code"] == 0
    assert state(agent)["standby"] == "none"
    assert agent.halt()["done"]


def test_go_works_after_any_number_of_generations(start):
    agent = start({})
    pids = set()
    for generation in range(4):
        agent.halt()
        pids.add(agent.start({"generation": generation})["pid"])
        assert {each["generation"] for each in events_until(agent, "first_step")} == {generation}
    assert len(pids) == 4


def test_events_of_an_earlier_generation_are_not_reported_again(start):
    agent = start({})
    agent.start({"generation": 0})
    events_until(agent, "first_step")
    agent.halt()
    agent.start({"generation": 1})
    assert {each["generation"] for each in events_until(agent, "first_step")} == {1}


def test_a_standby_that_dies_is_replaced(start):
    agent = start({})
    first = wait_for_standby(agent)
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: state(agent)["standby_pid"] not in (first, None))
    assert agent.start({"generation": 0})["pid"] != first
    assert event(agent, "joined")["generation"] == 0


def test_a_standby_killed_while_it_prepares_is_replaced_while_go_waits(start, tmp_path):
    (tmp_path / "deaths").mkdir()
    agent = start({"die": 2, "folder": str(tmp_path / "deaths")})
    agent.start({"generation": 0})
    assert event(agent, "joined")["generation"] == 0
    assert len(os.listdir(tmp_path / "deaths")) == 2


def test_standbys_that_are_killed_again_and_again_are_a_failure(start, tmp_path):
    (tmp_path / "deaths").mkdir()
    agent = start({"die": 100, "folder": str(tmp_path / "deaths")})
    wait_for_standby(agent, "failed")
    agent.start({"generation": 0})
    assert event(agent, "exit")["signal"] == signal.SIGKILL
    assert len(os.listdir(tmp_path / "deaths")) == standby_module.MAX_DEATHS + 1


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        (
            {"generation": 0, "limits": {"step_flor_s": 1.0}},
            "limits: there is no limit 'step_flor_s'; the limits are phases, ",
        ),
        ({"generation": 0, "limits": {"save_s": -1}}, "limits: save_s = -1: expected a number, at least 0"),
        ({"generation": 0, "shown_lines": "5"}, "shown_lines = '5': expected int"),
        ({"host": 0}, "generation is missing"),
    ],
)
def test_orders_that_an_agent_does_not_understand_are_a_failure_of_the_generation(start, orders, problem):
    """Nobody waits for the answer to a start: without the event, the driver had waited for this host for ever."""
    agent = start({})
    with pytest.raises(OrderError, match=f"the order 'start': {problem}"):
        agent.start(orders)
    told = event(agent, "exception")
    assert (told["type"], told.get("generation")) == ("OrderError", orders.get("generation"))
    assert agent.take_over(0)["orders"] is None
    with pytest.raises(OrderError, match="expected an object with `cmd`"):
        agent.order({"reason": "requested"})
    with pytest.raises(OrderError, match="id is missing"):
        agent.profile({"cmd": "profile"}, None, 1.0)


def test_a_failed_preparation_comes_as_a_failure_of_the_generation(start):
    agent = start({"fail": "no such data"})
    answer = agent.start({"generation": 0})
    assert answer["pid"]
    events = events_until(agent, "exit")
    assert [each["ev"] for each in events] == ["phase", "exception", "exit"]
    assert events[1]["message"] == "no such data"
    assert events[2]["log_tail"] == ["Traceback of no such data"]
    assert {each["generation"] for each in events} == {0}
    assert agent.halt()["exit"]["code"] == 1


def test_a_preparation_that_exits_says_so_with_its_log(start):
    agent = start({"exit": 4})
    agent.start({"generation": 0})
    exited = event(agent, "exit")
    assert (exited["code"], exited["log_tail"]) == (4, ["last words"])


def test_a_mended_preparation_is_tried_again(start):
    agent = start({"fail": "no such data"})
    agent.start({"generation": 0})
    event(agent, "exit")
    agent.prepare({"tag": "mended"})
    agent.start({"generation": 1})
    assert event(agent, "warm")["tag"] == "mended"


def test_a_failed_preparation_is_tried_afresh_by_the_next_go(start, tmp_path):
    agent = start({"fail": "no such data"})
    first = agent.start({"generation": 0})["pid"]
    event(agent, "exit")
    assert agent.start({"generation": 1})["pid"] != first
    assert event(agent, "exception")["generation"] == 1


def test_a_module_that_is_missing(start):
    agent = start({}, module="tests.programs.absent")
    agent.start({"generation": 0})
    assert "No module named tests.programs.absent" in event(agent, "exit")["log_tail"][-1]


def test_a_standby_that_is_not_ready_in_time(start):
    agent = start({"hang": True})
    assert wait_until(lambda: state(agent)["standby_pid"])
    standby = state(agent)["standby_pid"]
    with pytest.raises(TimeoutError, match=r"generation 3: .* is not ready after 1 s; it printed:"):
        agent.start({"generation": 3, "limits": {"phases": {"import": 1}}})
    told = event(agent, "overdue")
    assert (told["generation"], told["phase"], told["limit_s"]) == (3, "import", 1)
    assert "prepare (" in told["stacks"]
    assert told["log_tail"] == ["hanging in prepare"]
    after = agent.halt()
    assert (after["pid"], after["generation"], after["overdue"]["phase"]) == (standby, 3, "import")
    assert is_gone(standby)


def test_go_without_a_preparation(start):
    agent = start()
    with pytest.raises(TimeoutError, match=r"no preparation has come within 0.1 s; call prepare"):
        agent.start({"generation": 0, "limits": {"phases": {"import": 0.1}}})
    assert event(agent, "overdue")["stacks"] is None


def test_halt_ends_a_go_that_waits(start):
    agent = start()
    failures = []

    def start_one():
        try:
            agent.start({"generation": 0})
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=start_one)
    thread.start()
    assert wait_until(lambda: agent.take_over(0)["alive"])
    assert agent.halt()["generation"] == 0
    thread.join()
    assert failures == ["generation 0 was halted before its process was ready"]
    agent.prepare({"tag": "late"})
    wait_for_standby(agent)
    assert not agent.take_over(0)["alive"]
    agent.start({"generation": 1})
    assert {each["generation"] for each in events_until(agent, "joined")} == {1}


def test_a_preparation_may_come_after_go(start):
    agent = start()
    threading.Timer(0.2, agent.prepare, [{"tag": "late"}]).start()
    agent.start({"generation": 0})
    assert event(agent, "warm")["tag"] == "late"


def test_go_while_a_process_runs(start):
    agent = start({})
    pid = agent.start({"generation": 0})["pid"]
    with pytest.raises(RuntimeError, match=f"process {pid} of generation 0 still runs; call halt first"):
        agent.start({"generation": 1})
    assert not is_gone(pid)


def test_a_process_that_cannot_be_started(start, monkeypatch):
    agent = start()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    agent.prepare({})
    with pytest.raises(RuntimeError, match=r"cannot start `tests.programs.echo_worker`.*No such file"):
        agent.start({"generation": 0})
    assert event(agent, "exception")["generation"] == 0
    monkeypatch.undo()
    agent.start({"generation": 1})
    assert event(agent, "joined")["generation"] == 1


def test_training_goes_on_without_a_log(start, tmp_path):
    """As on a full disk: the file cannot be opened."""
    (tmp_path / "local").write_text("a file where the folder of logs should be")
    agent = start({})
    agent.start({"generation": 0, "then": "raise"})
    said = event(agent, "note")["message"]
    assert said.startswith("what the training process prints is lost: its log ")
    assert str(tmp_path / "local") in said
    assert event(agent, "exit")["log_tail"] == []


def test_the_log_of_a_process_is_copied_to_the_folder_of_the_run_when_it_ends(start, tmp_path):
    agent = start({})
    about = agent.start({"generation": 0, "then": "exit"})
    event(agent, "exit")
    assert about["log_path"].startswith(str(tmp_path / "local"))
    copy = tmp_path / "logs" / os.path.basename(about["log_path"])
    assert wait_until(lambda: copy.exists() and copy.read_text() == "leaving\n")
    after = agent.halt()
    assert (after["log_path"], after["log_copy"]) == (about["log_path"], str(copy))


def test_shared_storage_that_hangs_holds_up_neither_polls_nor_halts_nor_the_next_generation(start, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "CLOSE_TIMEOUT_S", 0.1)
    agent = start({})
    agent.start({"generation": 0})
    event(agent, "first_step")
    # Whoever opens one of these waits for ever: a log itself, or what is to become its copy.
    (tmp_path / "logs").mkdir(exist_ok=True)
    names = [name for n in range(1, 6) for name in (f"process-{os.getpid()}-{n:04d}.log",)]
    for name in [*names, *(f".{name}.{os.getpid()}.part" for name in names)]:
        (tmp_path / "logs" / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "logs" / name)

    def fail_and_go_on():
        os.kill(state(agent)["pid"], signal.SIGKILL)
        event(agent, "exit")
        agent.halt()
        agent.start({"generation": 1})
        return event(agent, "first_step")["generation"]

    thread, answers = in_background(fail_and_go_on)
    thread.join(LONG_S)
    assert answers == [1]


def test_a_new_preparation_replaces_the_standby_and_the_same_one_does_not(start):
    agent = start({"tag": "old"})
    old = wait_for_standby(agent)
    agent.prepare({"tag": "old"})
    assert state(agent)["standby_pid"] == old
    agent.prepare({"tag": "new"})
    agent.start({"generation": 0})
    assert event(agent, "warm")["tag"] == "new"
    assert wait_until(lambda: is_gone(old))


def test_a_process_outlives_the_thread_that_asked_for_it(start):
    agent = start()
    for call in (lambda: agent.prepare({}), lambda: agent.start({"generation": 0})):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    pid = event(agent, "first_step") and state(agent)["pid"]
    time.sleep(0.2)
    assert not is_gone(pid)


def test_stacks_on_request_though_nothing_is_suspicious(start):
    agent = start({})
    agent.take_stacks()
    assert agent.halt()["stacks"] is None  # nothing runs
    agent.start({"generation": 0})
    event(agent, "first_step")
    agent.take_stacks()
    told = agent.halt()
    assert "echo_worker.py" in told["stacks"]
    assert told["overdue"] is None
    agent.start({"generation": 1})
    assert agent.halt()["stacks"] is None  # those were of another generation


def test_stacks_from_the_process_itself_where_py_spy_cannot(start, monkeypatch):
    monkeypatch.setattr("cluster.agent.stack_dump._py_spy", lambda pid: ("", "not permitted"))
    agent = start({})
    agent.start({"generation": 0})
    event(agent, "first_step")
    agent.take_stacks()
    assert state(agent)["alive"]
    assert "echo_worker.py" in agent.halt()["stacks"]


def test_a_process_without_progress_is_overdue_and_its_stacks_say_where(start):
    agent = start({})
    agent.start({"generation": 4, "steps": 3, "limits": {"step_floor_s": 1.0, "step_factor": 0.1}})
    told = event(agent, "overdue")
    assert (told["generation"], told["phase"], told["limit_s"], told["step"]) == (4, "train", 1.0, 3)
    assert told["waited_s"] >= 1.0
    assert "echo_worker.py" in told["stacks"]
    after = agent.halt()
    assert after["overdue"]["stacks"] == after["stacks"] == told["stacks"]
    assert (after["batch_index"], after["exit"]) == (3, None)
    assert after["state"].startswith("S (sleeping)")


def test_a_frozen_process_is_overdue_and_can_be_diagnosed(start):
    agent = start({})
    pid = agent.start({"generation": 0, "limits": {"step_floor_s": 1.0}})["pid"]
    event(agent, "first_step")
    os.kill(pid, signal.SIGSTOP)
    told = event(agent, "overdue")
    assert told["state"].startswith("T (stopped)")
    assert "echo_worker.py" in told["stacks"]
    assert agent.halt()["state"].startswith("T (stopped)")


def test_a_frozen_process_where_py_spy_is_missing(start, monkeypatch):
    monkeypatch.setattr("cluster.agent.stack_dump._py_spy", lambda pid: ("", "not installed"))
    agent = start({})
    pid = agent.start({"generation": 0, "limits": {"step_floor_s": 1.0}})["pid"]
    event(agent, "first_step")
    os.kill(pid, signal.SIGSTOP)
    told = event(agent, "overdue")
    assert told["stacks"] == f"no stacks of process {pid}, which is T (stopped) and cannot answer: py-spy: not installed"


def test_an_agent_is_not_held_up_by_slow_stacks(start, monkeypatch):
    reading = threading.Event()
    monkeypatch.setattr("cluster.agent.stack_dump.stacks", lambda child: reading.wait(LONG_S) and "late")
    agent = start({})
    agent.start({"generation": 0, "limits": {"step_floor_s": 1.0}})
    assert event(agent, "overdue")["stacks"] is None
    assert state(agent)["alive"]
    threading.Timer(0.2, reading.set).start()
    agent.take_stacks()
    assert agent.halt()["stacks"] == "late"


def test_a_stuck_save_is_overdue_though_steps_go_on(start):
    agent = start({})
    agent.start({"generation": 0, "limits": {"save_s": 1.0}})
    event(agent, "first_step")
    agent.order({"cmd": "emit", "ev": "saving", "step": 7})
    cursor, step = agent.poll(0, 0)["cursor"], 1
    while not (found := [each for each in agent.poll(cursor, 0.1)["events"] if each["ev"] == "overdue"]):
        step += 1
        agent.order({"cmd": "emit", "ev": "heartbeat", "step": step, "batch_index": step, "busy_s": 0.0})
    assert (found[0]["phase"], found[0]["limit_s"]) == ("save", 1.0)
    assert found[0]["step"] > 1


def test_nothing_is_overdue_after_the_end(start):
    agent = start({})
    agent.start({"generation": 0, "then": "exit", "limits": {"step_floor_s": 0.2}})
    cursor = events_until(agent, "exit") and agent.poll(0, 0)["cursor"]
    assert agent.poll(cursor, 1.0)["events"] == []


def test_a_notice_in_a_file_is_reported_once(start, tmp_path):
    agent = start({}, notice_file=str(tmp_path / "notice"))
    agent.start({"generation": 2})
    event(agent, "first_step")
    assert state(agent)["notice"] is None
    (tmp_path / "notice").write_text('{"reason": "spot", "deadline_s": 25}')
    told = event(agent, "notice")
    assert (told["generation"], told["reason"], told["deadline_s"], told["node"]) == (2, "spot", 25.0, True)
    assert state(agent)["notice"]["reason"] == agent.halt()["notice"]["reason"] == "spot"
    time.sleep(1.5 * preemption.INTERVAL_S)
    assert [each["ev"] for each in agent.poll(0, 0)["events"]].count("notice") == 1


def test_a_notice_reaches_a_driver_that_runs_no_process(start, tmp_path):
    (tmp_path / "notice").touch()
    agent = start(notice_file=str(tmp_path / "notice"))
    assert wait_until(lambda: state(agent)["notice"])
    assert state(agent)["notice"]["deadline_s"] is None


def test_a_newer_driver_fences_out_the_older_one(start):
    agent = start({})
    agent.start({"generation": 0}, driver_term=3)
    assert agent.take_over(4)["generation"] == 0
    for call in (agent.describe, agent.poll, agent.halt, agent.take_stacks, agent.shutdown):
        with pytest.raises(StaleDriver, match="this driver's term is 3, and a driver with term 4 leads this agent"):
            call(driver_term=3)
    for call in (agent.prepare, agent.start, agent.order):
        with pytest.raises(StaleDriver):
            call({"generation": 1}, driver_term=3)
    with pytest.raises(StaleDriver):
        agent.take_over(3)
    assert agent.poll(0, 0, driver_term=4)["host_state"]["alive"]


def test_a_new_driver_learns_what_the_agent_is_at(start):
    agent = start({})
    before = agent.take_over(1)
    assert (before["generation"], before["orders"], before["alive"], before["done"]) == (None, None, False, False)
    orders = {"generation": 5, "steps": 2, "then": "done"}
    agent.start(orders, driver_term=1)
    assert wait_until(lambda: agent.take_over(2)["done"])
    about = agent.take_over(2)
    assert (about["generation"], about["orders"]) == (5, orders)
    events = agent.poll(about["first_event"], 0, driver_term=2)["events"]
    assert [each["ev"] for each in events][:4] == ["phase", "warm", "joined", "first_step"]
    assert about["pid"] == os.getpid()


def test_an_agent_without_a_driver_ends_its_processes(start):
    agent = start({}, lease_s=1.5)
    pid = agent.start({"generation": 0})["pid"]
    event(agent, "first_step")
    standby = wait_for_standby(agent)
    for _ in range(10):  # a driver that calls keeps it
        time.sleep(0.2)
        assert agent.poll(0, 0)["host_state"]["alive"]
    assert agent.is_led()
    assert wait_until(lambda: is_gone(pid) and is_gone(standby))
    assert not agent.is_led()


def test_shutdown_leaves_nothing(start):
    agent = start({})
    pid = agent.start({"generation": 0})["pid"]
    event(agent, "first_step")
    standby = wait_for_standby(agent)
    agent.shutdown()
    assert is_gone(pid)
    assert is_gone(standby)


def test_describe(start):
    about = start().describe()
    assert about["pid"] == os.getpid()
    assert about["host_ip"]
    assert about["next_port"] > 0


def profile_meanwhile(agent, name, hosts):
    return in_background(lambda: agent.profile({"cmd": "profile", "id": name, "steps": 2}, hosts, LONG_S))


def test_a_profile_is_asked_for_whoever_leads_and_answered_by_its_own_process(start):
    agent = start()
    agent.prepare({}, driver_term=5)
    assert agent.profile({"cmd": "profile", "id": "early"}, None, LONG_S)["host"] is None  # nobody trains here yet
    agent.start({"generation": 0, "host": 1}, driver_term=5)
    assert agent.profile({"cmd": "profile", "id": "other"}, [0, 2], LONG_S)["host"] is None
    thread, answers = profile_meanwhile(agent, "mine", [1])
    for name in ("another's", "mine"):
        agent.order({"cmd": "emit", "ev": "profile", "id": name, "path": f"of {name}", "problem": None}, driver_term=5)
    thread.join(LONG_S)
    assert answers == [{"host": 1, "path": "of mine", "problem": None}]
    assert agent.profile({"cmd": "profile", "id": "slow"}, [1], 0.1)["problem"].startswith("no answer within 0.1 s")


def test_a_process_that_dies_while_it_is_profiled_is_an_answer(start):
    agent = start({})
    pid = agent.start({"generation": 0, "host": 0})["pid"]
    thread, answers = profile_meanwhile(agent, "mine", None)
    os.kill(pid, signal.SIGKILL)
    thread.join(LONG_S)
    assert answers[0]["host"] == 0
    assert "the training process has ended" in answers[0]["problem"]


# ---------------------------------------------------------------------- precompilations


def precompiling(agent):
    """The process of a precompilation, once it has its orders."""

    def find():
        known = {state(agent)["pid"], state(agent)["standby_pid"]}
        return [
            child
            for child in psutil.Process().children()
            if child.pid not in known
            and "echo_worker" in " ".join(child.cmdline())
            and child.nice() == precompile_module.NICENESS
        ]

    (process,) = wait_until(find)
    return process


def test_a_precompilation_runs_beside_the_training_and_ends(start):
    agent = start({"tag": "a"})
    agent.start({"generation": 0})
    before = events_until(agent, "first_step")
    assert agent.precompile({"cmd": "precompile", "then": "done"}, LONG_S) is None
    assert state(agent)["alive"]
    assert agent.poll(0, 0)["events"] == before  # nothing of it is told as the generation's


@pytest.mark.parametrize(
    ("orders", "problem"),
    [({"then": "raise"}, "ValueError: boom"), ({"then": "exit"}, "it ended in the phase import; see ")],
)
def test_a_precompilation_that_fails_says_why_and_hurts_nobody(start, orders, problem):
    agent = start({})
    agent.start({"generation": 0})
    assert agent.precompile({"cmd": "precompile", **orders}, LONG_S).startswith(problem)
    assert state(agent)["alive"]


def test_a_precompilation_has_its_time(start):
    agent = start({})
    assert agent.precompile({"cmd": "precompile"}, 0.5).startswith("not done within 0.5 s (phase ")  # it may not have begun


def test_a_precompilation_makes_its_folder_of_logs(start, tmp_path):
    agent = start({})
    wait_for_standby(agent)
    shutil.rmtree(tmp_path / "local")
    assert agent.precompile({"cmd": "precompile", "then": "done"}, LONG_S) is None
    assert list((tmp_path / "local").rglob("precompilations-*.log"))


def test_a_precompilation_needs_a_preparation(start):
    assert start().precompile({"cmd": "precompile"}, LONG_S) == "no preparation has come"


@pytest.mark.parametrize("end", ["halt", "shutdown", "start", "precompile"])
def test_whatever_needs_the_machine_ends_a_precompilation(start, end):
    agent = start({})
    wait_for_standby(agent)
    thread, answers = in_background(lambda: agent.precompile({"cmd": "precompile"}, LONG_S))
    process = precompiling(agent)
    arguments = {"start": [{"generation": 0}], "precompile": [{"cmd": "precompile", "then": "done"}, LONG_S]}.get(end, [])
    getattr(agent, end)(*arguments)
    thread.join(LONG_S)
    assert answers == ["it was stopped"]
    assert wait_until(lambda: is_gone(process.pid))
    if end == "shutdown":
        assert agent.precompile({"cmd": "precompile", "then": "done"}, LONG_S) == "this host does not train"


def test_an_agent_is_called_after_its_run_and_its_host(start):
    assert repr(start(run_name="tiny")) == "tiny, logs"


# ---------------------------------------------------------------------- memory for snapshots


def given(agent, cursor=0):
    """How many files are the process's own, and what it has found in those of earlier ones."""
    return json.loads(event(agent, "note", cursor)["message"])


def in_memory(pid="self"):
    """The files of snapshots that a process has open."""
    links = [os.path.join(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd")]
    return [os.readlink(link) for link in links if os.path.exists(link) and "memfd:snapshot" in os.readlink(link)]


def next_generation(agent, number, how, text=None):
    """Ends the process, and begins this generation. Returns what its process was given; it has written `text`."""
    pid = state(agent)["pid"]
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not state(agent)["alive"])
    elif how == "halt":
        agent.halt(LONG_S)
    cursor = agent.poll(0, 0)["cursor"]
    wait_for_standby(agent)
    agent.start({"cmd": "start", "generation": number})
    found = given(agent, cursor)
    if text is not None:
        cursor = agent.poll(0, 0)["cursor"]
        agent.order({"cmd": "keep", "text": text})
        assert event(agent, "note", cursor)["message"] == "kept"
    return found


def tell(agent, **about):
    cursor = agent.poll(0, 0)["cursor"]
    agent.order({"cmd": "emit", **about})
    event(agent, about["ev"], cursor)


def test_what_a_process_has_in_memory_outlives_it_until_it_is_not_needed(start):
    """Killed by somebody or by the agent: nobody can change it then. Nothing of it is left, whatever ends."""
    before = len(in_memory())
    agent = start({"snapshot_slots": 2})
    assert next_generation(agent, 0, "first", "a") == [2, []]
    assert next_generation(agent, 1, "kill", "b") == [2, ["a"]]
    assert next_generation(agent, 2, "halt", "c") == [2, ["a", "b"]]
    tell(agent, ev="snapshots", since=1)
    assert next_generation(agent, 3, "kill", "d") == [2, ["b", "c"]]
    tell(agent, ev="snapshots", since=3)
    agent.order({"cmd": "stop", "reason": "max_steps"})  # it is done: its own is not needed either
    assert wait_until(lambda: not state(agent)["alive"])
    agent.prepare({"snapshot_slots": 2, "tag": "next"})
    wait_for_standby(agent)
    assert wait_until(lambda: len(in_memory()) == before + 2)  # those of the standby
    agent.shutdown()
    assert len(in_memory()) == before


def test_what_ends_each_process_that_gets_it_is_given_up(start):
    agent = start({"snapshot_slots": 1})
    next_generation(agent, 0, "first", "a")
    found = [next_generation(agent, number, "kill")[1] for number in range(1, 5)]
    assert found == [["a"], ["a"], ["a"], []]


def test_without_snapshots_there_is_no_memory_for_them(start):
    agent = start({})
    agent.start({"cmd": "start", "generation": 0})
    assert "SNAPSHOT_FD" not in event(agent, "joined")["env"]
    assert in_memory(state(agent)["pid"]) == []
