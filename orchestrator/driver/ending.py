"""How a launch ends: the exceptions of a driver, how far it has trained, and what of that is saved. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gangway.stop_reason import StopReason


class TrainingFailed(Exception):
    """The run cannot go on; the message is for the user."""


class StoppedOnRequest(TrainingFailed):
    """Somebody has asked for a stop where no gang trained that could save, or the gang did not stop in time."""


class TimeIsUp(Exception):
    """The time limit has passed, and the hosts could not stop by themselves. Not a failure: the run has a checkpoint."""


class Superseded(Exception):
    """Another driver has taken the run. This one must stop."""


Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Progress:
    """In steps of the run. Steps that a rollback has taken back do not count."""

    trained: int
    saved: int | None
    """The newest committed checkpoint; None if there is none."""
    why_not_saved: str | None = None
    """The problem of the last save that failed; None if a later one has succeeded."""

    @property
    def lost(self) -> int:
        return max(0, self.trained - (self.saved or 0))


@dataclass(frozen=True)
class Ending:
    status: Status
    error: str | None
    line: str | None
    """What the command says last; None if the status says all."""


def ending(result: Mapping[str, Any], failure: TrainingFailed | None, requested: str | None, progress: Progress) -> Ending:
    """Returns how the launch has ended. `result` is the trainer's, and {} with a `failure`. `requested`: why somebody has asked
    for a stop.

    A launch is stopped only if what it has trained is saved, and it ended because of the request. One that was at its
    `time_limit` is stopped too if its hosts had to be ended: that is no failure as long as there is a checkpoint.
    """
    if failure is None and StopReason(result["stop_reason"]).finished:
        return Ending("finished", None, None)
    if failure is not None and not isinstance(failure, StoppedOnRequest):
        line = _line(progress, progress.why_not_saved or "of the error above")
        return Ending("failed", str(failure), line if requested or (progress.why_not_saved and progress.lost) else None)
    error = None if failure is None else str(failure)
    if progress.lost and (failure is not None or result["stop_reason"] != StopReason.TIME_LIMIT):
        why = progress.why_not_saved or error or "the trainer has reported no checkpoint of its last step"
        return Ending("failed", error or "the last step is not saved", _line(progress, why))
    why = progress.why_not_saved or "the hosts did not stop in time"
    is_over = failure is None and result["stop_reason"] == StopReason.TIME_LIMIT
    again = "its time_limit is used up: raise it to go on" if is_over else "run the same command again to go on"
    return Ending("stopped", error, f"{_line(progress, why)}; {again}")


def _line(progress: Progress, why: str) -> str:
    saved = f"saved at {progress.saved}" if progress.saved is not None else "nothing is saved"
    if progress.saved is None and not progress.trained:
        return "stopped before the first step"
    lost = f"; {progress.lost} step{'' if progress.lost == 1 else 's'} lost, because {why}" if progress.lost else ""
    # A launch that has not trained yet has the steps of those before it.
    return f"stopped at {max(progress.trained, progress.saved or 0)}; {saved}{lost}"
