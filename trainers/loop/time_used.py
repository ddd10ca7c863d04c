"""The time that a run has used of its `time_limit`, over the processes that trained it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

META = "time_used_s"
"""The key in a checkpoint's meta."""


@dataclass
class TimeUsed:
    """Counts on from what the driver knows, or from what the checkpoint of an earlier process recorded, if that is more."""

    before_s: float = 0.0
    """The seconds that earlier processes have used."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self):
        self._began_s = self.clock()

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Takes what the checkpoint that this process starts with has recorded. Not for a rollback: it gives no time back."""
        # The greater one: a run that trained alone may go on under a driver, which then knows less.
        self.before_s = max(self.before_s, meta.get(META, 0.0))

    def meta(self) -> dict[str, float]:
        return {META: self.before_s + self.clock() - self._began_s}

    def deadline_s(self, limit_s: float) -> float:
        """Returns when the limit will have passed, on `clock`."""
        return self._began_s + limit_s - self.before_s
