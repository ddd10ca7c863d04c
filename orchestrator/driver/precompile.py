"""Compiles ahead of need: when a host is lost or comes back, the next gang finds its compiled programs on its machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cluster.agent.machine import with_port
from cluster.gang.calls import Answer, MailboxLike, NoAnswer
from cluster.gang.gang_like import SlotLike
from gangway.wire.orders import Precompile
from orchestrator.config.job import JobConfig
from orchestrator.driver.event_handler import EventHandler
from orchestrator.driver.generation import Generation
from orchestrator.driver.halt import AGENT_TIMEOUT_S
from orchestrator.driver.membership import Membership
from orchestrator.policies import elasticity
from orchestrator.run_state.launch import Launch


class Precompilations:
    """Runs one precompilation at a time while the gang trains. If one fails, a later start has to compile; nothing else
    happens."""

    def __init__(
        self,
        config: JobConfig,
        launch: Launch,
        events: EventHandler,
        membership: Membership,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config, self.launch, self.events, self.membership, self.clock = config, launch, events, membership, clock
        enabled = config.driver.precompile
        self._enabled = config.hosts.kind == "cpu" if enabled is None else enabled
        self._ready: set[tuple[int, str]] = set()
        """(number of hosts, machine): the machine has the programs of such a gang, as far as this driver knows."""
        self._given_up: set[int] = set()
        """Numbers of hosts that could not be precompiled in this generation."""
        self._slots: list[SlotLike] = []
        """The slots that precompile now, in rank order."""
        self._answers: dict[int, Answer] = {}
        self._mailbox: MailboxLike | None = None
        self._deadline_s = 0.0
        """An agent that has not answered by then is frozen or cut off."""
        self._generation: int | None = None

    @property
    def busy(self) -> bool:
        return self._mailbox is not None

    def poll(self, generation: Generation) -> None:
        """Called in every round of the poller. Never waits."""
        # Not before the first step: it would take cores from the start of the gang.
        if not self._enabled or not generation.training:
            return
        if self._generation != generation.number:
            self._begin(generation)
        if self._mailbox is not None:
            self._collect(self._mailbox)
        else:
            self._start_next()

    def _begin(self, generation: Generation) -> None:
        self._generation, self._mailbox = generation.number, None  # the start of a generation has ended all precompilations
        self._given_up.clear()
        # The members have compiled or loaded these programs by their first step.
        self._ready |= {(generation.num_hosts, slot.node_id) for slot in self.membership.gang.members if slot.node_id}

    def _start_next(self) -> None:
        gang, slots = self.membership.gang, {slot.number: slot for slot in self.membership.gang.slots}
        if not all(slot.available for slot in gang.members):
            return  # a silent member may be about to fail
        present = [slot.number for slot in gang.members]
        others = [slot.number for slot in self.membership.idle()]
        allowed = [count for count in self.membership.allowed() if count not in self._given_up]
        gang_to_compile = elasticity.next_precompilation(
            present, others, allowed=allowed, is_ready=lambda count, number: (count, slots[number].node_id) in self._ready
        )
        if gang_to_compile is not None:
            self._start([slots[number] for number in gang_to_compile])

    def _start(self, slots: Sequence[SlotLike]) -> None:
        gang, limits = self.membership.gang, self.config.driver.watchdog
        host0 = slots[0].description
        assert host0 is not None
        common: Precompile = {
            "cmd": "precompile",
            "host": 0,
            "num_hosts": len(slots),
            "coordinator": with_port(host0["host_ip"], host0["next_port"]),
            "program_key": self.launch.launch_id,
        }
        timeout_s = limits.import_s + limits.join_s + limits.compile_s
        self._slots, self._deadline_s = list(slots), self.clock() + timeout_s + AGENT_TIMEOUT_S
        self._answers, self._mailbox = {}, gang.mailbox()
        for host, slot in enumerate(slots):
            orders: Precompile = {**common, "host": host, **gang.orders(host)}
            self._mailbox.expect(host, gang.ask(slot, "precompile", orders, timeout_s))

    def _collect(self, mailbox: MailboxLike) -> None:
        self._answers |= {answer.tag: answer for answer in mailbox.collect(0.0)}
        count = len(self._slots)
        if len(self._answers) < count and self.clock() < self._deadline_s:
            return
        self._mailbox = None
        silent = Answer(None, error=NoAnswer("its agent does not answer"))
        answers = {host: self._answers.get(host, silent) for host in range(count)}
        problems = {host: problem for host, answer in answers.items() if (problem := _problem(answer)) is not None}
        if problems:
            self._given_up.add(count)
            host, problem = next(iter(problems.items()))
            self.events.note(f"could not compile ahead for {count} hosts (host {host} of them: {problem})", "warning")
            return
        self._ready |= {(count, slot.node_id) for slot in self._slots if slot.node_id}
        self.events.note(f"compiled ahead for {count} hosts")


def _problem(answer: Answer) -> str | None:
    return str(answer.error) if answer.error is not None else answer.value
