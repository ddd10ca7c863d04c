"""The callback interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunInfo:
    """Where the run stands, as the host knows it. Reading it never waits for the device."""

    global_step: int = 0
    """Batches drawn, those included whose update was not applied. After a rollback it is smaller than before."""
    epoch: float = 0.0
    max_steps: int | None = None

    @property
    def batch_index(self) -> int:
        """Of the next batch: the same number."""
        return self.global_step


class Callback:
    """Override what is of interest. Every method gets the RunInfo and, by keyword, what its event has."""

    def on_train_begin(self, state: RunInfo, **kwargs: Any) -> None: ...

    def on_train_end(self, state: RunInfo, **kwargs: Any) -> None: ...

    def on_step_begin(self, state: RunInfo, *, batch: Any, **kwargs: Any) -> None: ...

    def on_step_end(self, state: RunInfo, **kwargs: Any) -> None:
        """The step was dispatched; it may still be running. Do not fetch arrays here: use `on_publish`."""

    def on_publish(self, state: RunInfo, *, metrics: dict[str, float], **kwargs: Any) -> None: ...

    def on_evaluate(self, state: RunInfo, *, metrics: dict[str, float], **kwargs: Any) -> None: ...


@dataclass
class CallbackList:
    callbacks: list[Callback] = field(default_factory=list)

    def add(self, callback: Callback) -> None:
        if not isinstance(callback, Callback):
            raise TypeError(f"add_callback got {callback!r}: expected an instance of a subclass of trainers.callbacks.Callback")
        self.callbacks.append(callback)

    def call(self, event: Callable[..., None], state: RunInfo, **kwargs: Any) -> None:
        """`event` is a method of Callback, such as `Callback.on_publish`. An error of a callback ends training as an error."""
        for callback in self.callbacks:
            getattr(callback, event.__name__)(state, **kwargs)
