"""The reasons why a training run ended without failing. Free of JAX: drivers read it too."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """In rising order of weight: if hosts ask to stop for different reasons, the last one counts. So a person's request is not
    reported as a matter of machines."""

    MAX_STEPS = "max_steps"
    MAX_EPOCHS = "max_data_epochs"
    END_OF_DATA = "end_of_data"
    EARLY_STOPPED = "early_stopped"
    TIME_LIMIT = "time_limit"
    RESIZE = "resize"
    PREEMPTED = "preempted"
    HEAD_LOST = "head_lost"
    INTERRUPTED = "interrupted"
    TERMINATED = "terminated"
    REQUESTED = "requested"

    @property
    def finished(self) -> bool:
        """Whether training reached an end that its configuration names (a later start would have nothing left to do)."""
        return self in FINISHED


FINISHED = (StopReason.MAX_STEPS, StopReason.MAX_EPOCHS, StopReason.END_OF_DATA, StopReason.EARLY_STOPPED)
