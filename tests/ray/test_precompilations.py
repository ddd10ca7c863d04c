"""Which precompilations the driver asks for, and what it makes of the answers: real calls of Ray, agents that only answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.gang.calls import Mailbox
from orchestrator.config.job import build
from orchestrator.driver.generation import Generation
from orchestrator.driver.precompile import Precompilations
from tests.programs.processes import wait_until
from tests.ray.machines import own_ray

WINGS = ("orchestrator/driver/precompile.py", "cluster/gang")

LIMITS = {"import_s": 1.0, "join_s": 2.0, "compile_s": 3.0}


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray(1):
        yield


@ray.remote(num_cpus=0, max_concurrency=2)
class Agent:
    def precompile(self, answer):
        if answer == "never":
            import time

            time.sleep(1000)
        return answer


@dataclass(eq=False)
class Slot:
    number: int
    agent: Any
    available: bool = True

    @property
    def node_id(self):
        return f"node {self.number}"

    @property
    def description(self):
        return {"host_ip": "10.0.0.1", "next_port": 7}


@dataclass
class Stage:
    """Slots, of which the first three train; `answers[slot]` is what an agent says (default: that all is compiled)."""

    answers: dict[int, Any] = field(default_factory=dict)
    asked: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    notes: list[tuple[str, ...]] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self):
        self.slots = [Slot(number, Agent.remote()) for number in range(3)]
        self.members = list(self.slots)
        config = build(
            {
                "name": "job",
                "max_num_steps": 1,
                "hosts": {"min": 1, "max": 3},
                "driver": {"watchdog": LIMITS},
                "mesh": {"data": -1},
            }
        )
        membership = SimpleNamespace(gang=self, idle=lambda: [], allowed=lambda: [1, 2, 3])
        events = SimpleNamespace(note=lambda *said: self.notes.append(said))
        launch = SimpleNamespace(launch_id="launch")
        self.precompilations = Precompilations(config, launch, events, membership, lambda: self.now_s)

    def orders(self, host):
        return {"slice": 0}

    mailbox = staticmethod(Mailbox)

    def ask(self, slot, method, orders, timeout_s):
        self.asked.append((slot.number, orders))
        return getattr(slot.agent, method).remote(self.answers.get(slot.number))

    def poll(self, number=0):
        generation = Generation(number, 3)
        generation.first_step_at_s = dict.fromkeys(range(3), 0.0)
        self.precompilations.poll(generation)
        return not self.precompilations.busy


def test_every_machine_precompiles_once_for_the_next_smaller_gang():
    stage = Stage()
    stage.poll()
    assert [number for number, _ in stage.asked] == [0, 1]
    about = {"cmd": "precompile", "num_hosts": 2, "coordinator": "10.0.0.1:7", "program_key": "launch", "slice": 0}
    assert [orders for _, orders in stage.asked] == [{**about, "host": 0}, {**about, "host": 1}]
    assert wait_until(stage.poll)
    stage.poll()
    assert [number for number, _ in stage.asked[2:]] == [2, 0]
    assert wait_until(stage.poll)
    assert stage.poll()
    assert len(stage.asked) == 4
    assert stage.notes == [("compiled ahead for 2 hosts",)] * 2


def test_not_before_all_train_and_not_while_one_is_silent():
    stage = Stage()
    stage.precompilations.poll(Generation(0, 3))
    stage.slots[1].available = False
    stage.poll()
    assert stage.asked == []


@pytest.mark.slow("starts a gang")
def test_what_goes_wrong_is_said_and_not_tried_again_by_this_generation():
    stage = Stage(answers={1: "OutOfMemory: 3 GB"})
    stage.poll()
    assert wait_until(stage.poll)
    assert stage.notes == [("could not compile ahead for 2 hosts (host 1 of them: OutOfMemory: 3 GB)", "warning")]
    stage.answers.clear()
    stage.poll()
    assert [number for number, _ in stage.asked[2:]] == [0]  # for one host
    assert wait_until(stage.poll)
    stage.asked.clear()
    stage.poll(number=1)
    assert [number for number, _ in stage.asked] == [0, 1]


def test_an_agent_that_never_answers_holds_nothing_up_for_ever():
    stage = Stage(answers={0: "never"})
    stage.poll()
    stage.now_s = sum(LIMITS.values())
    assert not stage.poll()
    stage.now_s += 20
    assert stage.poll()
    assert stage.notes == [("could not compile ahead for 2 hosts (host 0 of them: its agent does not answer)", "warning")]


@pytest.mark.slow("starts a gang")
def test_an_agent_that_dies_is_a_problem_like_any_other():
    stage = Stage(answers={0: "never"})
    stage.poll()
    ray.kill(stage.slots[0].agent)
    assert wait_until(stage.poll)
    assert "could not compile ahead for 2 hosts (host 0 of them: " in stage.notes[0][0]
