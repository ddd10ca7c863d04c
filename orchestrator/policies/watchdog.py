"""The limits of a training process without progress: the settings, and what of them travels with the orders."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gangway.wire.limits import PHASES, Limits


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """How long a training process may stay without progress, in seconds (configuration section `driver.watchdog`)."""

    import_s: float = 300.0
    """From the start order until imports, configuration and data are ready. A warm standby needs no time."""
    join_s: float = 120.0
    """For all hosts to find each other."""
    restore_s: float = 900.0
    """For reading the checkpoint, or making the initial state."""
    compile_s: float = 1800.0
    """For compiling the step, or loading the kept program."""
    first_step_s: float = 900.0
    """For the first step of a process. Later ones have `step_floor_s` and `step_factor`."""
    step_floor_s: float = 60.0
    """The limit of a step is never shorter than this."""
    step_factor: float = 20.0
    """The limit of a step is this factor times the generation's median step, if that is more than `step_floor_s`."""
    save_s: float = 900.0
    """From the start of a checkpoint until it is complete or has failed, whatever the process does meanwhile."""
    evaluate_s: float = 900.0
    """Without another batch of the evaluation, and for what follows the last one."""
    preview_s: float = 900.0
    """For the model to generate its previews, including the first compilation."""
    finish_s: float = 900.0
    """From the end of the training until the process has ended. A save, an evaluation and previews have limits of their own."""
    silent_s: float | None = 3600.0
    """For a trainer of one's own that reports neither phases nor steps: how long no process of the gang may send an event or
    print a line. null: no limit. One host is enough to break the silence, for often only host 0 prints."""
    stacks_before_s: float = 3.0
    """How long before a limit the stacks are taken (at half the limit, if that is shorter): so the alarm has them."""

    def __post_init__(self):
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        problems = [
            f"{name} = {value}: expected more than 0" for name, value in values.items() if value is not None and not value > 0
        ]
        if problems:
            raise ValueError("\n".join(problems))

    def limits(self) -> Limits:
        """Returns the limits as an agent goes by them: by the name of the phase, not of the setting."""
        return Limits(
            phases={name: getattr(self, phase.limit) for name, phase in PHASES.items() if phase.limit is not None},
            first_step_s=self.first_step_s,
            step_floor_s=self.step_floor_s,
            step_factor=self.step_factor,
            save_s=self.save_s,
            silent_s=self.silent_s,
            stacks_before_s=self.stacks_before_s,
        )

    def orders(self) -> dict[str, Any]:
        """Returns the limits as they travel with orders."""
        return dataclasses.asdict(self.limits())
