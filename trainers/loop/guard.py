"""Looks at what each step and each state came to, and decides what follows: nothing, a skipped batch, a rollback or an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import jax

from gangway.errors import LossScaleError, LossSpikeError, NonFiniteLossError, NonFiniteStateError
from trainers import runtime
from trainers.config import AnomalyConfig
from trainers.loop import anomalies
from trainers.loop.anomalies import Anomaly, Decision
from trainers.loop.inflight import Agreed
from trainers.loop.lineage import Lineage
from trainers.step.host_flags import UpdateStatus
from trainers.step.state import TrainState


class GoBack(Exception):
    """Raised to continue training from an older state. It ends a segment, wherever in it the anomaly was read."""

    def __init__(self, decision: Decision):
        super().__init__(str(decision.anomaly))
        self.decision = decision


@dataclass
class Guard:
    """All hosts read the same results, so all of them decide alike. Every method may wait for the device."""

    config: AnomalyConfig
    lineage: Lineage
    diagnose: Callable[[TrainState, int], str] = lambda state, batch_index: ""
    """(state, batch index) -> a text that says where the batch's loss or gradient stopped being finite."""
    broken: Callable[[TrainState], Sequence[str]] = lambda state: ()
    """Returns the names of the leaves of a state whose values have become infinite or NaN."""
    infinite_parameters: Callable[[], bool | None] = lambda: None
    """Returns whether parameters were infinite as training began or went back, such as a mask; None: not known."""
    _diagnosed: bool = False
    _infinite: bool | None = None
    """Whether they were: then only what is looked at before a save tells that others have become so."""
    _waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    _suspicious_to: int = -1
    """Up to this step an update breaks the state, and it is not known which."""

    def start(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Training begins, or goes on from an older state. What this waits for the device, it waits inside `waiting()`."""
        self._infinite, self._waiting = self.infinite_parameters(), waiting

    def look_at_step(self, agreed: Agreed, state: TrainState) -> None:
        """Acts on the result of a step. `state` is the newest one. Raises GoBack, LossScaleError, LossSpikeError or
        NonFiniteLossError."""
        status = agreed.status
        if status is UpdateStatus.SCALE_EXHAUSTED:
            raise LossScaleError(anomalies.scale_exhausted(agreed.batch_index, agreed.loss))
        if status is UpdateStatus.APPLIED and self._broke_state(agreed):
            status = UpdateStatus.BROKE_STATE
        if status in anomalies.KINDS:
            self._handle(Anomaly(status, agreed.batch_index, agreed.loss, agreed.expected_loss), state)

    def looks_at_every_state(self, step: int) -> bool:
        """Whether a state up to this step was found broken: then each one is looked at."""
        return step <= self._suspicious_to

    def look_at_state(self, agreed: Agreed, state: TrainState, batch_index: int) -> None:
        """Treats the update by a batch, the newest, as an anomaly if it has broken the state."""
        if self._broken(state):
            self._handle(Anomaly(UpdateStatus.BROKE_STATE, batch_index, agreed.loss, agreed.expected_loss), state)

    def look_at_the_last(self, state: TrainState, step: int) -> None:
        """Looks at the state before training ends: from here it can still go back, and from the last save no more."""
        if leaves := self._broken(state):
            self.find_what_broke(NonFiniteStateError(step, leaves), step)

    def find_what_broke(self, error: NonFiniteStateError, step: int) -> None:
        """Goes back, and looks at the state after every step from there: what has broken it since the last save, the step itself
        has not reported. Raises the error if the run is to fail, or if every step was looked at already."""
        if self.config.non_finite == "raise" or step <= self._suspicious_to:
            raise NonFiniteLossError(f"{error}: {anomalies.ADVICE[UpdateStatus.BROKE_STATE]}") from error
        self._suspicious_to = step
        anomaly = Anomaly(UpdateStatus.BROKE_STATE, step - 1, math.nan, math.nan)
        raise GoBack(Decision(anomaly, "rollback", go_back_to=step - 1)) from error

    def _broken(self, state: TrainState) -> list[str]:
        with self._waiting():
            return list(self.broken(state))

    def _broke_state(self, agreed: Agreed) -> bool:
        """Whether the update has made parameters infinite or NaN."""
        found = bool(agreed.not_finite)
        if self._infinite is None:
            self._infinite = found
        return found and not self._infinite

    def _handle(self, anomaly: Anomaly, state: TrainState) -> None:
        decision = anomalies.decide(anomaly, self.config, self.lineage.skipped)
        # Before the decision is carried out: after a rollback the parameters that gave the value are gone.
        origin = self._origin(anomaly, state)
        decision = replace(decision, origin=origin)
        if decision.action == "raise":
            message = f"{decision.error}; {origin}" if origin else decision.error
            raise (LossSpikeError if anomaly.status is UpdateStatus.LOSS_SPIKE else NonFiniteLossError)(message)
        self.lineage.skipped.update(decision.skipped_batches)
        if decision.action == "rollback":
            raise GoBack(decision)
        if jax.process_index() == 0:
            runtime.current().emit({"ev": "anomaly", **decision.event(), "restored_step": None})

    def _origin(self, anomaly: Anomaly, state: TrainState) -> str:
        """Returns where the first non-finite value came from. Only once in a process: it takes as long as compiling a step."""
        if anomaly.status is UpdateStatus.BROKE_STATE:
            return f"not finite: {', '.join(self._broken(state)[: anomalies.SHOWN_LEAVES])}"
        if anomaly.status is not UpdateStatus.NON_FINITE or self._diagnosed:
            return ""
        self._diagnosed = True
        host = runtime.current()
        host.phase("diagnose")
        with self._waiting():
            origin = self.diagnose(state, anomaly.batch_index)
        host.phase("train")
        if jax.process_index() == 0:
            host.note(f"batch {anomaly.batch_index}: {origin}")
        return origin
