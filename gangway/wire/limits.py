"""The phases of a training process, in one table, and the limits of a process without progress, as they come with its orders: how
long each phase, a step and a save may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

FIRST_PHASE = "import"
"""The phase of a process until it reports another."""
STEPS = "train"
"""The phase whose progress are steps."""
FIRST_STEP = "first_step"
"""The watchdog's name for STEPS before the end of the first step."""
SAVE = "save"
"""The watchdog's name for a save in flight, whatever the process does beside it."""
RETRY_FOR_S = 1800.0
"""How long what may pass by itself is tried again: the default of `driver.restart.retry_for_s`."""
SILENCE = "silence"
"""What a process is in that reports nothing."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a process may stay without progress, in seconds. None, or a phase without an entry: no limit."""

    phases: Mapping[str, float] = field(default_factory=dict)
    """By the name that the process reports. Beside STEPS, which has a limit of its own."""
    first_step_s: float | None = None
    step_floor_s: float | None = None
    """The limit of a step is never shorter than this."""
    step_factor: float = 0.0
    """The limit of a step is this factor times the generation's median step, if that is more than `step_floor_s`."""
    save_s: float | None = None
    """From the start of a save until it is complete or has failed."""
    silent_s: float | None = None
    """Without an event or a printed line, where nothing else has a limit."""
    stacks_before_s: float = 3.0
    """How long before a limit the stacks are taken; at half the limit, if that is shorter."""


NAMES = tuple(item.name for item in fields(Limits))


def read(limits: Mapping[str, Any]) -> Limits:
    """Returns the limits that came with orders. Raises ValueError."""
    if unknown := [str(name) for name in limits if name not in NAMES]:
        raise ValueError(f"there is no limit {unknown[0]!r}; the limits are {', '.join(NAMES)}")
    phases = limits.get("phases", {})
    if not isinstance(phases, Mapping):
        raise ValueError(f"phases = {phases!r:.50}: expected an object")
    numbers = {**{name: value for name, value in limits.items() if name != "phases"}, **phases}
    for name, value in numbers.items():
        if value is not None and (type(value) not in (int, float) or value < 0):
            raise ValueError(f"{name} = {value!r:.50}: expected a number, at least 0")
    return Limits(**limits)


@dataclass(frozen=True)
class Phase:
    """One phase of a training process. The process reports it: `trainers.runtime.current().phase(name)`."""

    category: str
    """The category of its seconds in the goodput ledger (`orchestrator/run_state/goodput.py`)."""
    label: str
    """The state that the console shows while the least advanced host is in it."""
    limit: str | None = None
    """The setting of `driver.watchdog` with its limit; None: that of `train` follows from the step times, and `hold` ends by
    itself (`driver.restart.retry_for_s`)."""
    before_first_step: bool = False


PHASES: Mapping[str, Phase] = {
    "import": Phase("import", "importing", "import_s", before_first_step=True),
    "join": Phase("join", "joining", "join_s", before_first_step=True),
    "restore": Phase("restore", "restoring", "restore_s", before_first_step=True),
    "compile": Phase("compile", "compiling", "compile_s", before_first_step=True),
    "train": Phase("step", "training", before_first_step=True),
    "evaluate": Phase("evaluation", "evaluating", "evaluate_s"),
    "preview": Phase("evaluation", "generating previews", "preview_s"),
    "diagnose": Phase("detection", "diagnosing", "compile_s"),
    "save": Phase("checkpoint", "saving", "save_s"),
    "hold": Phase("checkpoint", "waiting for room", None),
    "finish": Phase("finish", "finishing", "finish_s"),
}
"""In the order of a start. A gang is in the phase of its least advanced host."""
