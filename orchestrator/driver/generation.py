"""A generation, as its events describe it: the phase and the step of each host, and which hosts are done or broken. Pure.

A driver that adopts a gang handles all events again that the agents have kept. This is safe: the same events in each host's order
change nothing. The cost of an event does not grow with the number of hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gangway.stop_reason import StopReason
from gangway.wire.events import (
    AnomalyTreated,
    Done,
    FirstStep,
    Heartbeat,
    HostEvent,
    MachineNotice,
    Notice,
    Overdue,
    Restored,
    Snapshots,
)
from gangway.wire.limits import PHASES
from orchestrator.run_state.incidents import Action

START_PHASES = tuple(name for name, phase in PHASES.items() if phase.before_first_step)
"""The phases of a start, in order. The gang is in the phase of its least advanced host."""

RESTARTING = (StopReason.RESIZE, StopReason.PREEMPTED)
"""Stop reasons after which another generation starts."""


@dataclass(frozen=True)
class Finished:
    """All hosts are done."""

    stop_reason: str
    result: Mapping[str, Any]
    """The result that the trainer of host 0 reported at its end."""


@dataclass(frozen=True)
class Paused:
    """All hosts have saved and stopped, and another gang goes on."""

    stop_reason: str
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Failed:
    """A host has failed or hangs: the generation cannot go on."""


End = Finished | Paused | Failed


@dataclass
class Generation:
    """One life of the gang. Only its own methods change it."""

    number: int
    num_hosts: int
    high_water_step: int = 0
    """The furthest step of any earlier generation, or before a rollback. Steps up to it are replayed."""
    began_at_s: float = 0.0
    """When the driver gave the hosts their orders, on its own clock."""
    phases: dict[int, str] = field(default_factory=dict)
    entered: dict[str, dict[int, float]] = field(default_factory=dict)
    """When each host first entered each phase: by phase, then by host."""
    first_step_at_s: dict[int, float] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    exited: set[int] = field(default_factory=set)
    """Hosts whose process is gone, because it was done or because it failed."""
    broken: dict[int, str] = field(default_factory=dict)
    """Hosts that failed or hang, with the event that showed it (`agent`: its agent is gone)."""
    suspects: set[int] = field(default_factory=set)
    """Hosts whose answers were late when the polling ended: frozen, cut off, or only slow."""
    overdue: dict[int, Overdue] = field(default_factory=dict)
    """The first limit that passed, by host. The host to blame may be another one."""
    silent: dict[int, Overdue] = field(default_factory=dict)
    """Hosts that report nothing and have been silent for longer than they may."""
    notices: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Hosts whose machine is about to be taken away."""
    saving: dict[int, int] = field(default_factory=dict)
    """The step of the save in flight, by host. A save runs beside the training and is not a phase."""
    saved: dict[int, int] = field(default_factory=dict)
    """The newest complete save, by host."""
    anomalies: list[AnomalyTreated] = field(default_factory=list)
    resumed_step: int | None = None
    source: str = ""
    """Where its state came from: `memory` or `storage`. Empty: there are no snapshots, or it is not known yet."""
    snapshots_since: int | None = None
    """The oldest generation whose snapshots may be gone on from after this one; None: as before it."""
    restored_step: int | None = None
    """The step to which the last rollback went back."""
    step: int = 0
    """The furthest step that any host reported. A step completes on all hosts or on none."""
    _hosts_in: list[int] = field(default_factory=list)
    """How many hosts are in each of START_PHASES; hosts in later phases count with the last."""

    def __post_init__(self) -> None:
        self._hosts_in = [self.num_hosts, *(0 for _ in START_PHASES[1:])]

    def observe(self, host: int, event: HostEvent) -> None:
        """Takes one event of this host. Events that say nothing about the generation are ignored."""
        match event["ev"]:
            case "phase":
                self._enter(host, event["phase"], event["t"])
            case "heartbeat" | "restored" | "snapshots":
                self._on_state(host, event)
            case "first_step":
                self._on_first_step(host, event)
            case "saving":
                self.saving[host] = event["step"]
            case "saved":
                self.saved[host] = event["step"]
                self.saving.pop(host, None)
            case "save_failed":
                self.saving.pop(host, None)
            case "overdue":
                self.overdue.setdefault(host, event)
                self.broken.setdefault(host, "overdue")
            case "notice":
                self._on_notice(host, event)
            case "done":
                self.done[host] = event
                self._advance(host, event["step"])
            case "exception":
                self.broken.setdefault(host, "exception")
            case "exit":
                self.exited.add(host)
                self.find_dead(host)
            case "anomaly":
                self._on_anomaly(event)

    def note_silence(self, host: int, silence: Overdue | None) -> None:
        """Records whether the host is silent. If all are that are not done, the generation hangs.

        One host alone may be silent for ever: often only host 0 prints. If another one hangs, host 0 soon waits for it.
        """
        if silence is None or host in self.done:
            self.silent.pop(host, None)
            return
        self.silent[host] = silence
        if len(self.silent) == self.num_hosts - len(self.done):
            for silent, event in self.silent.items():
                self.observe(silent, event)

    def lose_agent(self, host: int) -> None:
        """Records that the host's agent is gone, or silent for too long."""
        # Also over an earlier entry: a host without an agent must not be asked for a post-mortem.
        self.broken[host] = "agent"

    def find_dead(self, host: int) -> None:
        """Records that the host's process is gone, where no event said why."""
        # A process that was done has ended as it should.
        if host not in self.done:
            self.broken.setdefault(host, "exit")

    def suspect(self, hosts: Collection[int]) -> None:
        self.suspects = set(hosts)

    def announce(self, host: int, reason: str) -> None:
        """Records that the host's machine is about to be taken away, from another source than the host's events."""
        self.notices.setdefault(host, {"reason": reason, "node": True})

    def _enter(self, host: int, phase: str, at_s: float) -> None:
        self._hosts_in[_phase_index(self.phases.get(host, START_PHASES[0]))] -= 1
        self._hosts_in[_phase_index(phase)] += 1
        self.phases[host] = phase
        # Only the first time: events that come again after an adoption must not move it.
        self.entered.setdefault(phase, {}).setdefault(host, at_s)

    def _advance(self, host: int, step: int) -> None:
        # Host 0 reports a rollback. Heartbeats that other hosts sent before theirs may arrive later: they are ignored.
        if self.restored_step is None or host == 0:
            self.step = max(step, self.step)

    def _on_first_step(self, host: int, event: FirstStep) -> None:
        self._advance(host, event["step"])
        self.first_step_at_s.setdefault(host, event["t"])
        if self.resumed_step is None:
            self.resumed_step = event.get("resumed_step", event["step"] - 1)

    def _on_state(self, host: int, event: Heartbeat | Restored | Snapshots) -> None:
        if event["ev"] == "snapshots":
            # The greatest: a host that is ahead has let go of older ones already.
            self.snapshots_since = max(event["since"], self.snapshots_since or 0)
            return
        self._advance(host, event["step"])
        if event["ev"] == "restored":
            self.source = event.get("source", "")

    def _on_notice(self, host: int, event: Notice | MachineNotice) -> None:
        earlier = self.notices.get(host)
        # A notice about the machine replaces one about a SIGTERM, which may have come from anybody.
        if earlier is None or (event.get("node") and not earlier.get("node")):
            self.notices[host] = event

    def _on_anomaly(self, event: AnomalyTreated) -> None:
        if event in self.anomalies:  # an adopting driver gets it again
            return
        self.anomalies.append(event)
        if event["action"] == Action.ROLLBACK:
            # From the restored step to here everything is trained again: it counts as replay.
            self.high_water_step = max(self.high_water_step, self.step)
            assert event["restored_step"] is not None
            self.restored_step = self.step = event["restored_step"]

    @property
    def finished(self) -> bool:
        return len(self.done) == self.num_hosts

    @property
    def end(self) -> End | None:
        """How the generation has ended; None as long as it goes on."""
        # Before `wants_restart`: what breaks after all hosts are done costs nothing.
        if self.finished:  # all hosts have agreed on the reason: host 0's is that of all
            # A process that does not say why it is done has come to its end.
            reason, result = self.done[0].get("stop_reason", "max_steps"), self.done[0].get("result", {})
            reason = reason if reason in tuple(StopReason) else StopReason.MAX_STEPS
            return Paused(str(reason), result) if reason in RESTARTING else Finished(str(reason), result)
        return Failed() if self.wants_restart else None

    @property
    def wants_restart(self) -> bool:
        """Whether a host failed or hangs, so that the generation cannot go on."""
        return bool(self.broken)

    @property
    def training(self) -> bool:
        """Whether all hosts have completed their first step."""
        return len(self.first_step_at_s) == self.num_hosts

    @property
    def phase(self) -> str:
        """The phase of the gang: of its least advanced host while it starts, then of host 0."""
        behind = next(index for index, num_hosts in enumerate(self._hosts_in) if num_hosts)
        return START_PHASES[behind] if behind < len(START_PHASES) - 1 else self.phases.get(0, "train")

    @property
    def category(self) -> str:
        """The category of the goodput ledger for the present time."""
        category = PHASES[self.phase].category if self.phase in PHASES else "step"
        return "replay" if category == "step" and self.step < self.high_water_step else category

    def all_entered_s(self, phase: str) -> float | None:
        """Returns when the last host entered `phase`; None while one has not."""
        times = self.entered.get(phase, {})
        return max(times.values()) if len(times) == self.num_hosts else None

    def started_s(self) -> float | None:
        """Returns when the last host completed its first step; None before that."""
        return max(self.first_step_at_s.values()) if self.training else None


def _phase_index(phase: str) -> int:
    return START_PHASES.index(phase) if phase in START_PHASES else len(START_PHASES) - 1


def in_order(answers: Mapping[int, Sequence[HostEvent]]) -> list[tuple[int, int, HostEvent]]:
    """Returns all hosts' events as (host, index among the host's events, event), by time. The order of each host's events stays.

    A driver that adopts a gang needs this: host by host, the gang would stay in the first phase until the last host's events.
    """
    rows = []
    for host, events in answers.items():
        at_s = float("-inf")
        for index, event in enumerate(events):
            at_s = max(at_s, event["t"])  # a host's clock may have been set back
            rows.append((at_s, host, index, event))
    return [row[1:] for row in sorted(rows, key=lambda row: row[:3])]
