"""The phases of a training process, in one table: what each is called, how long it may take, what its time counts as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One thing that a training process is at. It says so itself: `trainers.runtime.current().phase(name)`."""

    category: str
    """What its seconds are in the goodput ledger (`orchestrator/run_state/goodput.py`)."""
    label: str
    """What the console says of a run whose least advanced host is in it."""
    limit: str | None = None
    """The field of `WatchdogConfig` that says how long it may go without progress; None: by the steps."""
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
    "finish": Phase("finish", "finishing", "finish_s"),
}
"""In the order in which a start comes to them. A gang is in the phase of the host that is least advanced."""

FIRST_STEP = "first_step"
"""What the watchdog calls `train` before the first step has ended: its limit is `first_step_s`."""
