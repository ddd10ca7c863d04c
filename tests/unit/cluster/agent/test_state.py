"""What an agent decides: inputs go in, effects come out. With real processes it is in tests/ray/test_agent.py."""

from __future__ import annotations

import pytest

from cluster.agent import effects, inputs
from cluster.agent import state as state_module
from cluster.agent.driver_lease import StaleDriver
from cluster.agent.inputs import Now
from cluster.agent.process_record import ExitStatus, ProcessRecord
from cluster.agent.standby import MAX_DEATHS
from cluster.agent.state import AgentState, HaltedError
from gangway.wire.orders import OrderError

LEASE_S = 100.0
WARM = {"t": 0.0, "ev": "warm"}
KILLED_BY_AGENT, KILLED, LEFT = (
    ExitStatus(None, 9, 0.0, by_parent=True),
    ExitStatus(None, 9, 0.0, by_parent=False),
    ExitStatus(3, None, 0.0, by_parent=False),
)


class Driven:
    """A state with a clock, whose processes are records. Calls are named by their numbers."""

    def __init__(self):
        self.now_s, self.todo, self.answers, self.num_calls = 0.0, [], {}, 0
        self.state = AgentState("a module", LEASE_S, 0.0)

    def feed(self, event):
        made = self.state.handle(event, Now(self.now_s, 5e9 + self.now_s))
        for effect in made:
            if isinstance(effect, effects.Answer | effects.Refuse | effects.RefuseSlow):
                assert effect.call not in self.answers, "a call is answered twice"
                self.answers[effect.call] = effect
            else:
                self.todo.append(effect)
        return made

    def call(self, kind, *arguments, term=0):
        self.num_calls += 1
        self.feed(kind(self.num_calls, term, *arguments))
        return self.num_calls

    def value(self, call):
        return self.answers[call].value

    def taken(self, kind):
        """The effects of this kind that have not been taken yet."""
        found = [effect for effect in self.todo if isinstance(effect, kind)]
        self.todo = [effect for effect in self.todo if not isinstance(effect, kind)]
        return found

    def spawn(self, *, warm=True):
        """Starts the process that is asked for."""
        (spawn,) = self.taken(effects.Spawn)
        process = ProcessRecord(100 + self.num_calls, "/logs/a.log", "/copies/a.log")
        self.feed(inputs.Spawned(process, spawn.preparation))
        if warm:
            self.feed(inputs.Said(process, WARM))
        return process

    def say(self, process, **event):
        self.feed(inputs.Said(process, {"t": 0.0, **event}))

    def events(self):
        return [(event["ev"], event["generation"]) for event in self.state.events.since(0)]


@pytest.fixture
def driven():
    return Driven()


@pytest.fixture
def training(driven):
    """One whose process of generation 0 has done its first step."""
    driven.call(inputs.Prepare, {"tag": "a"})
    process = driven.spawn()
    driven.call(inputs.Start, {"generation": 0})
    driven.say(process, ev="first_step", step=1)
    driven.spawn()
    return driven


def test_every_call_of_a_former_driver_is_refused_and_changes_nothing(driven):
    driven.call(inputs.TakeOver, term=4)
    driven.now_s = 50.0
    calls = [
        (inputs.Call,),
        (inputs.TakeOver,),
        (inputs.Prepare, {}),
        (inputs.Start, {"generation": 1}),
        (inputs.Order, {"cmd": "save"}),
        (inputs.Poll, 0, 0.0),
        (inputs.TakeStacks, 1.0),
        (inputs.Halt, 1.0, None),
        (inputs.Shutdown,),
    ]
    for kind, *arguments in calls:
        assert isinstance(driven.answers[driven.call(kind, *arguments, term=3)].error, StaleDriver)
    assert (driven.todo, driven.state.orders, driven.state.closed, driven.events()) == ([], None, False, [])
    assert driven.state.lease.left_s(50.0) == LEASE_S - 50.0


def test_a_start_waits_for_a_warm_process_which_gets_the_orders_before_the_answer(driven):
    driven.call(inputs.Prepare, {"tag": "a"})
    start = driven.call(inputs.Start, {"generation": 7, "host": 1})
    process = driven.spawn(warm=False)
    assert start not in driven.answers
    assert driven.value(driven.call(inputs.TakeOver))["alive"]
    driven.feed(inputs.Said(process, WARM))
    answer = driven.answers[start]
    assert answer.value == {"pid": process.pid, "log_path": "/logs/a.log", "log_copy": "/copies/a.log"}
    assert answer.first == effects.Send(process, {"generation": 7, "host": 1})
    assert driven.events() == [("warm", 7)]
    assert driven.taken(effects.Spawn) == []  # not before the first step


def test_a_preparation_that_comes_while_a_process_is_started_is_the_one_that_counts(driven):
    driven.call(inputs.Prepare, {"tag": "old"})
    driven.call(inputs.Prepare, {"tag": "new"})
    old = driven.spawn(warm=False)
    assert driven.taken(effects.Kill) == [effects.Kill(old)]
    assert driven.todo == [effects.Spawn({"tag": "new"})]
    driven.call(inputs.Prepare, {"tag": "new"})
    new = driven.spawn()
    assert (driven.state.standby.process, driven.todo) == (new, [])


def test_a_halt_ends_a_start_that_waits_and_leaves_the_standby(driven):
    driven.call(inputs.Prepare, {})
    start = driven.call(inputs.Start, {"generation": 2})
    process = driven.spawn(warm=False)
    halt = driven.call(inputs.Halt, 1.0, 0)
    assert isinstance(driven.answers[start].error, HaltedError)
    assert (driven.value(halt)["pid"], driven.value(halt)["gone"], driven.value(halt)["events"]) == (None, True, [])
    assert (driven.taken(effects.Kill), driven.state.standby.process) == ([], process)


def test_a_halt_answers_when_the_process_is_gone_or_the_time_is_over(training):
    process = training.state.current
    halt = training.call(inputs.Halt, 1.0, None)
    assert training.taken(effects.Kill) == [effects.Kill(process)]
    training.feed(inputs.KernelState(process, "S (sleeping)"))
    assert halt not in training.answers
    training.now_s = 1.0
    training.feed(inputs.TimePassed())
    about = training.value(halt)
    assert (about["gone"], about["dying_s"], about["state"], about["clock_s"]) == (False, 1.0, "S (sleeping)", 5e9)
    start = training.call(inputs.Start, {"generation": 1})
    again = training.call(inputs.Halt, 1.0, None)
    assert isinstance(training.answers[start].error, HaltedError)
    start = training.call(inputs.Start, {"generation": 1})
    training.feed(inputs.Exited(process, KILLED_BY_AGENT, []))
    assert (training.value(again)["gone"], training.value(again)["exit"], training.value(again)["generation"]) == (True, None, 1)
    assert training.value(start)["pid"] != process.pid  # it has waited for the end of the former one
    assert training.events() == [("warm", 1)]  # nothing of the former generation, and its end was no failure


def test_a_start_that_is_refused_is_reported_and_leaves_the_generation(training):
    for orders, error in (({"generation": 1}, RuntimeError), ({"generation": 1, "limits": {"sav_s": 1.0}}, OrderError)):
        assert isinstance(training.answers[training.call(inputs.Start, orders)].error, error)
        assert training.events()[-1] == ("exception", 1)
    assert training.state.orders == {"generation": 0}


def test_a_poll_waits_for_an_event_and_not_for_a_heartbeat(training):
    process, cursor = training.state.current, training.state.events.next
    poll, late = training.call(inputs.Poll, cursor, 5.0), training.call(inputs.Poll, cursor + 1, 3.0)
    training.say(process, ev="heartbeat", step=2, batch_index=2)
    assert poll not in training.answers
    training.say(process, ev="saved", step=2)
    about = training.value(poll)
    assert ([event["ev"] for event in about["events"]], about["heartbeat"]["step"]) == (["saved"], 2)
    training.now_s = 3.0
    training.feed(inputs.TimePassed())
    assert training.value(late)["events"] == []


def test_an_end_by_itself_is_reported_and_another_standby_asked_for(driven):
    driven.call(inputs.Prepare, {})
    process = driven.spawn()
    driven.call(inputs.Start, {"generation": 0})
    driven.feed(inputs.Exited(process, LEFT, ["bye"]))
    assert driven.events() == [("warm", 0), ("exit", 0)]
    assert driven.taken(effects.Spawn) == [effects.Spawn({})]
    assert driven.value(driven.call(inputs.Halt, 1.0, None))["exit"]["log_tail"] == ["bye"]


def test_standbys_that_are_killed_are_replaced_so_many_times(driven):
    driven.call(inputs.Prepare, {})
    for _ in range(MAX_DEATHS + 1):
        process = driven.spawn(warm=False)
        driven.feed(inputs.Exited(process, KILLED, []))
    assert (driven.todo, driven.state.standby.state()) == ([], "failed")
    driven.call(inputs.Start, {"generation": 0})
    assert driven.events() == [("exit", 0)]


def test_a_process_without_progress_is_overdue_with_what_could_be_read(training):
    process = training.state.current
    training.state.monitor = None
    training.call(inputs.Halt, 0.0, None)
    training.feed(inputs.Exited(process, KILLED_BY_AGENT, []))
    training.call(inputs.Start, {"generation": 1, "limits": {"step_floor_s": 10.0}})
    process = training.state.current
    training.say(process, ev="first_step", step=1)
    training.now_s += 7.5
    training.feed(inputs.Look())
    assert training.taken(effects.ReadStacks) == [effects.ReadStacks(process)]
    training.now_s += 3.0
    training.feed(inputs.Look())
    (read,) = training.taken(effects.ReadOverdue)
    training.feed(inputs.OverdueSeen(read.alarm, "T (stopped)", ["last line"]))
    assert training.state.monitor.overdue is None  # the stacks may come
    training.now_s += state_module.STACKS_GRACE_S
    training.feed(inputs.Look())
    told = training.state.monitor.overdue
    assert (told["phase"], told["stacks"], told["state"], told["log_tail"]) == ("train", None, "T (stopped)", ["last line"])
    training.feed(inputs.StacksTaken(process, "late stacks"))
    assert training.value(training.call(inputs.Halt, 0.0, None))["stacks"] == "late stacks"


def test_stacks_of_a_former_process_are_not_those_of_the_next(training):
    process = training.state.current
    training.call(inputs.TakeStacks, 5.0)
    assert training.taken(effects.ReadStacks) == [effects.ReadStacks(process)]
    training.call(inputs.Halt, 0.0, None)
    training.feed(inputs.Exited(process, KILLED_BY_AGENT, []))
    training.call(inputs.Start, {"generation": 1})
    stacks = training.call(inputs.TakeStacks, 5.0)
    training.feed(inputs.StacksTaken(process, "of the former one"))
    assert stacks not in training.answers
    training.feed(inputs.StacksTaken(training.state.current, "of this one"))
    assert training.answers[stacks]
    assert training.state.monitor.stacks == "of this one"


@pytest.mark.parametrize("end", ["a driver", "the lease"])
def test_whoever_ends_it_all_processes_are_killed_and_none_is_started(training, end):
    processes = [training.state.current, training.state.standby.process]
    training.feed(inputs.LeaseEnded() if end == "the lease" else inputs.Shutdown("last", 0))
    assert training.taken(effects.Kill) == [effects.Kill(process) for process in processes]
    for process in processes:
        training.feed(inputs.Exited(process, KILLED_BY_AGENT, []))
    training.call(inputs.Prepare, {"tag": "another"})
    assert training.todo == []
