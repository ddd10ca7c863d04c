"""The callback interface."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
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
    """An observer: override what is of interest. Every method gets the RunInfo and, by keyword, what its event has.

    Nothing that a callback does may change a result, so their order does not matter; what is to change the state or the metrics
    is a hook of the trainer (`trainers.loop.hooks`). Called on every host, at the same steps. An error in one ends training as an
    error.
    """

    def on_train_begin(self, state: RunInfo, **kwargs: Any) -> None: ...

    def on_train_end(self, state: RunInfo, **kwargs: Any) -> None:
        """Training is over, saved and evaluated, whatever ended it but an error."""

    def on_exception(self, state: RunInfo, *, error: BaseException, **kwargs: Any) -> None:
        """Training ends with this error. Not for recovery: the error goes on."""

    def on_epoch_begin(self, state: RunInfo, *, epoch: int, **kwargs: Any) -> None: ...

    def on_epoch_end(self, state: RunInfo, *, epoch: int, **kwargs: Any) -> None: ...

    def on_step_begin(self, state: RunInfo, *, batch: Any, **kwargs: Any) -> None: ...

    def on_step_end(
        self, state: RunInfo, *, batch: Any, loss: Any, loss_dict: Mapping[str, Any], grad_norm: Any, **kwargs: Any
    ) -> None:
        """The step was dispatched; it may still be running. `loss`, `grad_norm` and the parts in `loss_dict` are on the device:
        `float()` of one waits for the step. To look at numbers without slowing training down, use `on_publish`."""

    def on_publish(
        self, state: RunInfo, *, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float], **kwargs: Any
    ) -> None:
        """The metrics of the interval that ended with `step`, a few steps before the newest. `seconds`: what the host spent in it
        on other things than steps."""

    def on_evaluate_begin(self, state: RunInfo, *, unit: str, **kwargs: Any) -> None:
        """The evaluation of a validation unit begins: `eval`, unless the configuration has others."""

    def on_evaluate(self, state: RunInfo, *, unit: str, metrics: Mapping[str, float], **kwargs: Any) -> None:
        """It has ended. The metrics are published by names that begin with the unit's: `eval_loss`."""

    def on_save(self, state: RunInfo, *, step: int, path: str, **kwargs: Any) -> None:
        """The checkpoint of `step` is complete: a little after it was begun, between two steps or at the end."""


OWN_COPIES = ("loss_dict", "metrics", "seconds")


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
            # Numbers in dicts of its own: what one writes into them is seen by nobody else. The batch is the one that is trained
            # on: faults on order (`trainers.diagnostics.fault_injection`) spoil it here.
            own = {name: dict(value) if name in OWN_COPIES else value for name, value in kwargs.items()}
            getattr(callback, event.__name__)(state, **own)

    def tell_saved(self, state: RunInfo, saved: deque[tuple[int, str]]) -> None:
        """Of each checkpoint (step, path) that is complete by now."""
        while saved:
            step, path = saved.popleft()
            self.call(Callback.on_save, state, step=step, path=path)
