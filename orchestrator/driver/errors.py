"""The exceptions with which a driver ends: the run has failed, its time is up, or another driver has taken it."""

from __future__ import annotations


class TrainingFailed(Exception):
    """The run cannot go on; the message is for the user."""


class StoppedOnRequest(TrainingFailed):
    """Somebody has asked for a stop where no gang trained that could save, or the gang did not stop in time."""


class TimeIsUp(Exception):
    """The time limit has passed, and the hosts could not stop by themselves. Not a failure: the run has a checkpoint."""


class Superseded(Exception):
    """Another driver has taken the run. This one must stop."""
