"""Compiling ahead: when a host is lost, or comes back, the next gang finds its programs on its machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cluster.agent.machine import with_port
from cluster.gang.calls import Answer, Mailbox, NoAnswer
from cluster.gang.slots import Slot
from orchestrator.config.job import JobConfig
from orchestrator.driver.event_handler import Intake
from orchestrator.driver.generation import Generation
from orchestrator.driver.halt import AGENT_TIMEOUT_S
from orchestrator.driver.membership import Roster
from orchestrator.policies import elasticity
from orchestrator.run_state.launch import Launch


class Precompilations:
    """One at a time, while the gang trains. What goes wrong costs nobody anything but that a later start compiles."""

    def __init__(
        self, config: JobConfig, launch: Launch, intake: Intake, roster: Roster, clock: Callable[[], float] = time.monotonic
    ):
        self.config, self.launch, self.intake, self.roster, self.clock = config, launch, intake, roster, clock
        wanted = config.driver.precompile
        self._wanted = config.hosts.kind == "cpu" if wanted is None else wanted
        self._ready: set[tuple[int, str]] = set()
        """(number of hosts, machine) that has the programs of such a gang, as far as this driver knows."""
        self._given_up: set[int] = set()
        """Numbers of hosts that could not be precompiled in this generation."""
        self._cast: list[Slot] = []
        """Who precompiles now, in rank order; and what they have answered, to whom."""
        self._answers: dict[int, Answer] = {}
        self._mailbox: Mailbox | None = None
        self._deadline_s = 0.0
        """Whose agent has not answered then is frozen, or cut off."""
        self._generation: int | None = None

    @property
    def busy(self) -> bool:
        return self._mailbox is not None

    def poll(self, generation: Generation) -> None:
        """Called every round of the watch. Never waits."""
        if not self._wanted or not generation.training:
            return
        if self._generation != generation.number:
            self._begin(generation)
        if self._mailbox is not None:
            self._collect(self._mailbox)
        else:
            self._start_next()

    def _begin(self, generation: Generation) -> None:
        self._generation, self._mailbox = generation.number, None  # the agents have ended what was under way
        self._given_up.clear()
        self._ready |= {(generation.num_hosts, slot.node_id) for slot in self.roster.gang.members if slot.node_id}

    def _start_next(self) -> None:
        gang, slots = self.roster.gang, {slot.number: slot for slot in self.roster.gang.slots}
        if not all(slot.available for slot in gang.members):
            return  # one that is silent has other worries
        present = [slot.number for slot in gang.members]
        others = [slot.number for slot in self.roster.idle()]
        allowed = [count for count in self.roster.allowed() if count not in self._given_up]
        found = elasticity.next_precompilation(
            present, others, allowed=allowed, is_ready=lambda count, number: (count, slots[number].node_id) in self._ready
        )
        if found is not None:
            self._start([slots[number] for number in found])

    def _start(self, cast: Sequence[Slot]) -> None:
        gang, limits = self.roster.gang, self.config.driver.watchdog
        lead = cast[0].description
        assert lead is not None
        common = {
            "cmd": "precompile",
            "num_hosts": len(cast),
            "coordinator": with_port(lead["host_ip"], lead["next_port"]),
            "program_key": self.launch.launch_id,
        }
        timeout_s = limits.import_s + limits.join_s + limits.compile_s
        self._cast, self._deadline_s = list(cast), self.clock() + timeout_s + AGENT_TIMEOUT_S
        self._answers, self._mailbox = {}, gang.mailbox()
        for host, slot in enumerate(cast):
            orders = {**common, "host": host, **gang.orders(host)}
            self._mailbox.expect(host, gang.ask(slot, "precompile", orders, timeout_s))

    def _collect(self, mailbox: Mailbox) -> None:
        self._answers |= {answer.tag: answer for answer in mailbox.take(0.0)}
        count = len(self._cast)
        if len(self._answers) < count and self.clock() < self._deadline_s:
            return
        self._mailbox = None
        silent = Answer(None, error=NoAnswer("its agent does not answer"))
        answers = {host: self._answers.get(host, silent) for host in range(count)}
        problems = {host: problem for host, answer in answers.items() if (problem := _problem(answer)) is not None}
        if problems:
            self._given_up.add(count)
            host, problem = next(iter(problems.items()))
            self.intake.note(f"could not compile ahead for {count} hosts (host {host} of them: {problem})", "warning")
            return
        self._ready |= {(count, slot.node_id) for slot in self._cast if slot.node_id}
        self.intake.note(f"compiled ahead for {count} hosts")


def _problem(answer: Answer) -> str | None:
    return str(answer.error) if answer.error is not None else answer.value
