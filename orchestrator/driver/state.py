"""What the driver is doing, and which category of the goodput ledger that is."""

from __future__ import annotations

from enum import Enum


class DriverState(Enum):
    """Each has the label that a person sees, and its category of the ledger. None: the category goes on as it is, or the events
    of the hosts say it (`Generation.category`)."""

    RESERVING = "reserving", "schedule"
    """It waits for machines."""
    IMPORTING = "importing", "import"
    """The processes of the first generation are being prepared."""
    TRAINING = "training", None
    SAVING = "saving", None
    """The hosts were asked to save and to stop."""
    HALTING = "recovering", None
    """It waits until killed processes have ended. What failed, and when, is not known yet."""
    RECOVERING = "recovering", "recovery"
    BACKING_OFF = "recovering", "idle"
    """It waits before the next try."""

    def __init__(self, label: str, category: str | None):
        self.label, self.category = label, category
