"""Shows what the model generates for a few prompts. A preview that fails never ends training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from trainers import runtime
from trainers.callbacks import RunInfo
from trainers.evaluation.previews import Previews
from trainers.runtime.multihost import StageError
from trainers.step.state import TrainState


@dataclass
class Previewer:
    """All hosts must call its methods alike."""

    previews: Previews | None
    """None: there are no prompts, or the task generates nothing."""
    parameters_of: Callable[[TrainState], Any]
    """Returns the parameters to generate with: those that are evaluated and exported."""
    info: RunInfo

    def show(self, state: TrainState) -> None:
        """Generates the texts; host 0 sends them as an event."""
        # On all hosts, for generating is a collective; host 0 alone reports.
        previews = self.generate(state)
        if previews and jax.process_index() == 0:
            runtime.current().emit({"ev": "preview", "step": self.info.global_step, "previews": previews})

    def generate(self, state: TrainState) -> list[dict[str, str]]:
        """Returns `prompt` and `text` of each preview. Empty if there is nothing to show, or if generation failed."""
        host = runtime.current()
        if self.previews is None:
            return []
        # A phase of its own: the watchdog must not take a long generation for a step that hangs.
        host.phase("preview")
        try:
            return self.previews(self.parameters_of(state), self.info.global_step, state.model_state)
        except StageError as error:  # raised on all hosts alike
            if jax.process_index() == 0:
                host.note(f"no previews at step {self.info.global_step}: {error}")
            return []
