"""How a driver ends its run, or leaves it to another driver."""

from __future__ import annotations


class TrainingFailed(Exception):
    """The run cannot go on; the message is for the user."""


class Superseded(Exception):
    """Another driver has taken the run: it has the say now."""
