"""One life of the gang, as its events tell it: who is in which phase, how far it is, who is done. Pure: no clock, no Ray.

A driver that adopts a gang folds all that the agents have kept: taking the same events again, in each host's order, changes
nothing. Nothing here costs more for a gang of thousands of hosts than for one of two, event by event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.agent.phases import PHASES
from orchestrator.run_state.incidents import Action
from trainers.runtime.stop_reason import StopReason

Event = Mapping[str, Any]

START_PHASES = tuple(name for name, phase in PHASES.items() if phase.before_first_step)
"""In order. The gang is in the phase of the host that is least advanced."""

RESTARTING = (StopReason.RESIZE, StopReason.PREEMPTED)
"""Stops that another generation follows."""


@dataclass(frozen=True)
class Finished:
    """All hosts are done."""

    stop_reason: str
    result: Mapping[str, Any]
    """What the trainer of host 0 told at its end."""


@dataclass(frozen=True)
class Paused:
    """All hosts have saved and stopped, for other hosts to go on."""

    stop_reason: str
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Failed:
    """A host has failed or hangs: nothing more will come of this generation."""


End = Finished | Paused | Failed


@dataclass
class Generation:
    """Changed by its own methods alone."""

    number: int
    num_hosts: int
    high_water_step: int = 0
    """The furthest step of any earlier generation, or before a rollback: up to there steps are trained again."""
    began_at_s: float = 0.0
    """When the driver gave the hosts their orders, on its own clock."""
    phases: dict[int, str] = field(default_factory=dict)
    entered: dict[str, dict[int, float]] = field(default_factory=dict)
    """When each host entered each phase, first time."""
    first_step_at_s: dict[int, float] = field(default_factory=dict)
    done: dict[int, Event] = field(default_factory=dict)
    exited: set[int] = field(default_factory=set)
    """Hosts whose process is gone, because it was done or because it failed."""
    broken: dict[int, str] = field(default_factory=dict)
    """Hosts that failed or hang, and by which event the driver learnt it (`agent`: its agent is gone)."""
    suspects: set[int] = field(default_factory=set)
    """Hosts whose agents owed the driver an answer when the watch over them ended: frozen, or cut off, or only slow."""
    overdue: dict[int, Event] = field(default_factory=dict)
    """The first limit that passed, by host. The host to blame may be another one."""
    notices: dict[int, Event] = field(default_factory=dict)
    """Hosts that are about to go away."""
    saving: dict[int, int] = field(default_factory=dict)
    """The save under way, by host: its step. It goes on beside the training, and is no phase."""
    saved: dict[int, int] = field(default_factory=dict)
    """The newest complete save, by host."""
    anomalies: list[Event] = field(default_factory=list)
    resumed_step: int | None = None
    restored_step: int | None = None
    """Of the last rollback."""
    step: int = 0
    """Completed by all hosts, as far as known: the furthest that any host told. A step completes on all or none, and is a batch
    drawn."""
    _hosts_in: list[int] = field(default_factory=list)
    """How many hosts are in each of START_PHASES, those beyond them counted with the last."""

    def __post_init__(self) -> None:
        self._hosts_in = [self.num_hosts, *(0 for _ in START_PHASES[1:])]

    def take(self, host: int, event: Event) -> None:
        if handler := self._handlers.get(event["ev"]):
            handler(self, host, event)

    def lose_agent(self, host: int) -> None:
        """The host's agent is gone, or as good as that."""
        self.broken[host] = "agent"

    def find_dead(self, host: int) -> None:
        """The host's process is not there any more, and no event tells why."""
        if host not in self.done:
            self.broken.setdefault(host, "exit")

    def suspect(self, hosts: Collection[int]) -> None:
        self.suspects = set(hosts)

    def announce(self, host: int, reason: str) -> None:
        """The host's machine is to be taken away: the driver knows it from elsewhere."""
        self.notices.setdefault(host, {"reason": reason, "node": True})

    def _on_phase(self, host: int, event: Event) -> None:
        self._hosts_in[_place(self.phases.get(host, START_PHASES[0]))] -= 1
        self._hosts_in[_place(event["phase"])] += 1
        self.phases[host] = event["phase"]
        self.entered.setdefault(event["phase"], {}).setdefault(host, event["t"])

    def _on_heartbeat(self, host: int, event: Event) -> None:
        # Host 0 tells of a rollback. What another host told before its own may come after that news.
        if self.restored_step is None or host == 0:
            self.step = max(event["step"], self.step)

    def _on_first_step(self, host: int, event: Event) -> None:
        self._on_heartbeat(host, event)
        self.first_step_at_s.setdefault(host, event["t"])
        if self.resumed_step is None:
            self.resumed_step = event.get("resumed_step", event["step"] - 1)

    def _on_saving(self, host: int, event: Event) -> None:
        self.saving[host] = event["step"]

    def _on_saved(self, host: int, event: Event) -> None:
        self.saved[host] = event["step"]
        self.saving.pop(host, None)

    def _on_save_failed(self, host: int, event: Event) -> None:
        self.saving.pop(host, None)

    def _on_overdue(self, host: int, event: Event) -> None:
        self.overdue.setdefault(host, event)
        self.broken.setdefault(host, "overdue")

    def _on_notice(self, host: int, event: Event) -> None:
        known = self.notices.get(host)
        # That the node goes is worth more than that the process got SIGTERM.
        if known is None or (event.get("node") and not known.get("node")):
            self.notices[host] = event

    def _on_done(self, host: int, event: Event) -> None:
        self.done[host] = event
        self._on_heartbeat(host, event)

    def _on_exception(self, host: int, event: Event) -> None:
        self.broken.setdefault(host, "exception")

    def _on_exit(self, host: int, event: Event) -> None:
        self.exited.add(host)
        if host not in self.done:
            self.broken.setdefault(host, "exit")

    def _on_anomaly(self, host: int, event: Event) -> None:
        if event in self.anomalies:
            return
        self.anomalies.append(event)
        if event["action"] == Action.ROLLBACK:
            self.high_water_step = max(self.high_water_step, self.step)
            self.restored_step = self.step = int(event["restored_step"])

    _handlers = {  # noqa: RUF012
        "phase": _on_phase,
        "heartbeat": _on_heartbeat,
        "restored": _on_heartbeat,
        "first_step": _on_first_step,
        "saving": _on_saving,
        "saved": _on_saved,
        "save_failed": _on_save_failed,
        "overdue": _on_overdue,
        "notice": _on_notice,
        "done": _on_done,
        "exception": _on_exception,
        "exit": _on_exit,
        "anomaly": _on_anomaly,
    }

    @property
    def finished(self) -> bool:
        return len(self.done) == self.num_hosts

    @property
    def end(self) -> End | None:
        """How the generation has ended; None as long as it goes on."""
        if self.finished:  # all have said what they agreed on
            reason, result = str(self.done[0]["stop_reason"]), self.done[0]["result"]
            return Paused(reason, result) if reason in RESTARTING else Finished(reason, result)
        return Failed() if self.wants_restart else None

    @property
    def wants_restart(self) -> bool:
        """Whether a host failed or hangs: nothing more will come of this generation."""
        return bool(self.broken)

    @property
    def training(self) -> bool:
        """Whether all hosts have completed their first step."""
        return len(self.first_step_at_s) == self.num_hosts

    @property
    def phase(self) -> str:
        """Of the gang: of its least advanced host while it starts, then of host 0."""
        behind = next(place for place, hosts in enumerate(self._hosts_in) if hosts)
        return START_PHASES[behind] if behind < len(START_PHASES) - 1 else self.phases.get(0, "train")

    @property
    def category(self) -> str:
        """Of the goodput ledger."""
        category = PHASES[self.phase].category if self.phase in PHASES else "step"
        return "replay" if category == "step" and self.step < self.high_water_step else category

    def all_entered_s(self, phase: str) -> float | None:
        """When the last host entered `phase`; None while one has not."""
        times = self.entered.get(phase, {})
        return max(times.values()) if len(times) == self.num_hosts else None

    def started_s(self) -> float | None:
        """When the last host had completed its first step."""
        return max(self.first_step_at_s.values()) if self.training else None


def _place(phase: str) -> int:
    return START_PHASES.index(phase) if phase in START_PHASES else len(START_PHASES) - 1


def in_order(answers: Mapping[int, Sequence[Event]]) -> list[tuple[int, int, Event]]:
    """All hosts' events as (host, place among its own, event), in the order in which they happened; each host's stay in its own.

    For a driver that adopts a gang: taken host by host, the gang would seem to be where the last host has not begun yet.
    """
    rows = []
    for host, events in answers.items():
        at_s = float("-inf")
        for place, event in enumerate(events):
            at_s = max(at_s, event["t"])  # a host's clock may have been set back
            rows.append((at_s, host, place, event))
    return [row[1:] for row in sorted(rows, key=lambda row: row[:3])]
