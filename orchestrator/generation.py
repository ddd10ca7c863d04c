"""One life of the gang, as its events tell it: who is in which phase, how far it is, who is done. Pure: no clock, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

START_PHASES = ("import", "join", "restore", "compile", "train")
"""In order. The gang is in the phase of the host that is least advanced."""

CATEGORY_OF_PHASE = {
    "import": "import",
    "join": "join",
    "restore": "restore",
    "compile": "compile",
    "train": "step",
    "evaluate": "evaluation",
    "save": "checkpoint",
    "finish": "finish",
}


@dataclass
class Generation:
    number: int
    num_hosts: int
    high_water_step: int = 0
    """The furthest step of any earlier generation: up to there steps are trained again."""
    phases: dict[int, str] = field(default_factory=dict)
    entered: dict[str, dict[int, float]] = field(default_factory=dict)
    """When each host entered each phase, first time."""
    steps: dict[int, int] = field(default_factory=dict)
    first_step_at_s: dict[int, float] = field(default_factory=dict)
    done: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    """Hosts that failed, and by which event the driver learnt it."""
    resumed_step: int | None = None

    def take(self, host: int, event: Mapping[str, Any]) -> None:
        kind = event["ev"]
        if kind == "phase":
            self.phases[host] = event["phase"]
            self.entered.setdefault(event["phase"], {}).setdefault(host, event["t"])
        elif kind in ("heartbeat", "first_step"):
            self.steps[host] = max(event["step"], self.steps.get(host, 0))
            if kind == "first_step":
                self.first_step_at_s[host] = event["t"]
                self.resumed_step = event.get("resumed_step", event["step"] - 1)
        elif kind == "done":
            self.done[host] = event
            self.steps[host] = max(event["step"], self.steps.get(host, 0))
        elif kind == "exception" or (kind == "exit" and host not in self.done):
            self.broken.setdefault(host, kind)

    @property
    def step(self) -> int:
        """Completed by all hosts, as far as known; host 0 is enough for that: a step completes on all or none."""
        return max(self.steps.values(), default=0)

    @property
    def finished(self) -> bool:
        return len(self.done) == self.num_hosts

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
