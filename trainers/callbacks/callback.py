"""The callback interface: observers of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from gangway.errors import UsageError
from trainers.checkpoint import layout
from trainers.other_systems import INSTEAD_OF_AN_EVENT
from trainers.overrides import check_overrides


@dataclass
class RunInfo:
    """The progress of the run, as the host knows it. Reading it never waits for the device."""

    global_step: int = 0
    """The number of batches drawn, including those whose update was not applied. A rollback makes it smaller."""
    epoch: float = 0.0
    max_steps: int | None = None
    _shown: Any = field(default=None, init=False, repr=False, compare=False)

    def train_state(self) -> Any:
        """Returns the present `TrainState`, that of `global_step`, in `on_publish`, `on_save` and `on_evaluate`. Elsewhere it
        raises UsageError.

        Its arrays are not copied. To read one waits for the steps in flight. Keep none after the event: the next step uses
        their memory. An array over several hosts is read by all of them alike.
        """
        if self._shown is None:
            raise UsageError("the state and the parameters can be read in on_publish, on_save and on_evaluate only")
        return self._shown

    @property
    def shown_state(self) -> Any:
        """What `train_state` returns; None where that raises."""
        return self._shown

    def params(self) -> Any:
        """Returns the parameters of `train_state`, as nested dicts of arrays."""
        return self.train_state().params

    @contextmanager
    def showing(self, train_state: Any) -> Iterator[None]:
        """Lets callbacks read this state meanwhile."""
        before, self._shown = self._shown, train_state
        try:
            yield
        finally:
            # A reference that stayed would keep the memory of the state, or lead to arrays that are donated.
            self._shown = before

    @property
    def batch_index(self) -> int:
        """The index of the next batch, which is the same number."""
        return self.global_step


class Callback:
    """An observer: override the methods of interest. Every method gets the RunInfo and, by keyword, the data of its event.

    A callback must not change a result, so the order of callbacks does not matter. To change the state or the metrics use a
    hook of the trainer (`trainers.base`). Callbacks are called on every host, at the same steps. An error in a callback
    ends training with that error.
    """

    def __init__(self, trainer: object = None):
        """`trainer`: kept for the methods, for those who want it. A subclass need not call this. During training it has the
        arguments, the model and the loaders; the live parameters are in `RunInfo.params`."""
        self.trainer = cast(Any, trainer)

    def on_train_begin(self, state: RunInfo, **kwargs: Any) -> None: ...

    def on_train_end(self, state: RunInfo, **kwargs: Any) -> None:
        """Training is over, saved and evaluated, whatever ended it except an error."""

    def on_exception(self, state: RunInfo, *, error: BaseException, **kwargs: Any) -> None:
        """Training ends with this error. It cannot be handled here: it is raised afterwards."""

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
        """The metrics of the interval that ended with `step`, a few steps before the newest, were published. `seconds` says
        what the host spent in it on other things than steps. `state.params()` are the newest parameters, not those of `step`."""

    def on_evaluate_begin(self, state: RunInfo, *, unit: str, **kwargs: Any) -> None:
        """The evaluation of a validation unit begins. The unit is `eval`, unless the configuration has others."""

    def on_evaluate(self, state: RunInfo, *, unit: str, metrics: Mapping[str, float], **kwargs: Any) -> None:
        """The evaluation of a unit has ended. The metrics are published under names that begin with the unit's: `eval_loss`."""

    def on_save(self, state: RunInfo, *, step: int, path: str, **kwargs: Any) -> None:
        """The checkpoint of `step` is complete: some time after it was begun, between two steps or at the end. `state.params()`
        are the newest parameters; those of `step` are in the files."""


COPIED = ("loss_dict", "metrics", "seconds")


@dataclass
class CallbackList:
    callbacks: list[Callback] = field(default_factory=list)

    def add(self, callback: Callback) -> None:
        if not isinstance(callback, Callback):
            raise TypeError(f"add_callback got {callback!r}: expected an instance of a subclass of trainers.callbacks.Callback")
        check_overrides(type(callback), INSTEAD_OF_AN_EVENT)
        self.callbacks.append(callback)

    def call(self, event: Callable[..., None], state: RunInfo, **kwargs: Any) -> None:
        """Calls a method of all callbacks; `event` is that method of Callback, such as `Callback.on_publish`. Errors are not
        caught."""
        for callback in self.callbacks:
            # Each callback gets its own copies of the dicts of numbers: what it writes into them nobody else sees. The batch is
            # the one that is trained on: fault injection (`trainers.diagnostics.fault_injection`) changes it here.
            arguments = {name: dict(value) if name in COPIED else value for name, value in kwargs.items()}
            getattr(callback, event.__name__)(state, **arguments)

    def report_saved(self, state: RunInfo, saved: deque[tuple[int, str]]) -> None:
        """Calls `on_save` for each checkpoint (step, path) that is complete by now; then lets go of it (`layout.readers`)."""
        # The thread that saves may append meanwhile; a deque allows that.
        while saved:
            step, path = saved.popleft()
            try:
                self.call(Callback.on_save, state, step=step, path=path)
            finally:
                layout.readers(path, -1)
