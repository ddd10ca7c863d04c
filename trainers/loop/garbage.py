"""When Python collects its garbage: at the same steps on all hosts, if the settings ask for it."""

from __future__ import annotations

import gc
from types import TracebackType


class GarbageCollection:
    """Python collects garbage when enough objects have been made: on each host at another step, and all hosts wait for the one
    that does. Within this context it is collected at steps that are a multiple of `every_steps`; None: as always."""

    def __init__(self, every_steps: int | None):
        self.every_steps = every_steps
        self._was_enabled = False

    def __enter__(self) -> GarbageCollection:
        if self.every_steps is not None:
            self._was_enabled = gc.isenabled()
            gc.disable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._was_enabled:
            gc.enable()

    def at(self, step: int) -> None:
        """Collects if it is time, between the dispatch of two steps: the devices have work meanwhile."""
        if self.every_steps is not None and step % self.every_steps == 0:
            gc.collect()
