"""One life of the gang, as its events tell it: who is in which phase, how far it is, who is done. Pure: no clock, no Ray.

A driver that adopts a gang folds all that the agents have kept: taking the same events again, in each host's order, changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.ledger import Action

Event = Mapping[str, Any]

START_PHASES = ("import", "join", "restore", "compile", "train")
"""In order. The gang is in the phase of the host that is least advanced."""

CATEGORY_OF_PHASE = {
    "import": "import",
    "join": "join",
    "restore": "restore",
    "compile": "compile",
    "train": "step",
    "evaluate": "evaluation",
    "preview": "evaluation",
    "diagnose": "detection",
    "save": "checkpoint",
    "finish": "finish",
}


@dataclass
class Generation:
    number: int
    num_hosts: int
    high_water_step: int = 0
    """The furthest step of any earlier generation, or before a rollback: up to there steps are trained again."""
    phases: dict[int, str] = field(default_factory=dict)
    entered: dict[str, dict[int, float]] = field(default_factory=dict)
    """When each host entered each phase, first time."""
    steps: dict[int, int] = field(default_factory=dict)
    """Completed, by host. A step is a batch drawn."""
    first_step_at_s: dict[int, float] = field(default_factory=dict)
    done: dict[int, Event] = field(default_factory=dict)
    exited: set[int] = field(default_factory=set)
    """Hosts whose process is gone, because it was done or because it failed."""
    broken: dict[int, str] = field(default_factory=dict)
    """Hosts that failed or hang, and by which event the driver learnt it (`agent`: the driver says so itself)."""
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
    _rolled_back_at_s: float = float("-inf")

    def take(self, host: int, event: Event) -> None:
        if handler := self._handlers.get(event["ev"]):
            handler(self, host, event)

    def _on_phase(self, host: int, event: Event) -> None:
        self.phases[host] = event["phase"]
        self.entered.setdefault(event["phase"], {}).setdefault(host, event["t"])

    def _on_heartbeat(self, host: int, event: Event) -> None:
        # What a host told before it rolled back may come after the news of it.
        if event["t"] >= self._rolled_back_at_s:
            self.steps[host] = max(event["step"], self.steps.get(host, 0))

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
            restored = int(event["restored_step"])
            self.restored_step, self.steps = restored, dict.fromkeys(self.steps, restored)
            self._rolled_back_at_s = event["t"]

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
    def step(self) -> int:
        """Completed by all hosts, as far as known; host 0 is enough for that: a step completes on all or none."""
        return max(self.steps.values(), default=0)

    @property
    def finished(self) -> bool:
        return len(self.done) == self.num_hosts

    @property
    def stopped_for(self) -> str | None:
        """Why the gang stopped, once all hosts have said so: they agreed on it."""
        return str(self.done[0]["stop_reason"]) if self.finished else None

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
        places = [START_PHASES.index(p) if p in START_PHASES else len(START_PHASES) for p in self.phases.values()]
        places += [0] * (self.num_hosts - len(places))
        behind = min(places)
        return START_PHASES[behind] if behind < len(START_PHASES) - 1 else self.phases.get(0, "train")

    @property
    def category(self) -> str:
        """Of the goodput ledger."""
        category = CATEGORY_OF_PHASE.get(self.phase, "step")
        return "replay" if category == "step" and self.step < self.high_water_step else category

    def all_entered_s(self, phase: str) -> float | None:
        """When the last host entered `phase`; None while one has not."""
        times = self.entered.get(phase, {})
        return max(times.values()) if len(times) == self.num_hosts else None

    def started_s(self) -> float | None:
        """When the last host had completed its first step."""
        return max(self.first_step_at_s.values()) if self.training else None


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
