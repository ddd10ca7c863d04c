"""The phases of a training process, in one table: name, label on the console, goodput category, setting of its time limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One phase of a training process. The process reports it: `trainers.runtime.current().phase(name)`."""

    category: str
    """The category of its seconds in the goodput ledger (`orchestrator/run_state/goodput.py`)."""
    label: str
    """The state that the console shows while the least advanced host is in it."""
    limit: str | None = None
    """The setting of `driver.watchdog` with its limit; None: the limit follows from the step times."""
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
"""In the order of a start. A gang is in the phase of its least advanced host."""
