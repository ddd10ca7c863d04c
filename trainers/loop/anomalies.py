"""Decides what to do about a batch whose update was not applied. Pure: every host reads the same status, so all decide alike."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from gangway.wire.events import AnomalyFields
from trainers.config import AnomalyConfig
from trainers.step.host_flags import UpdateStatus

SHOWN_BATCHES = 20
SHOWN_LEAVES = 3

KINDS = {
    UpdateStatus.NON_FINITE: "non_finite",
    UpdateStatus.LOSS_SPIKE: "loss_spike",
    UpdateStatus.BROKE_STATE: "broken_state",
}


@dataclass(frozen=True)
class Anomaly:
    status: UpdateStatus
    batch_index: int
    loss: float
    expected: float
    """The running mean of the losses before it; NaN if there were none."""

    @property
    def kind(self) -> str:
        return KINDS[self.status]

    def __str__(self) -> str:
        if self.status is UpdateStatus.LOSS_SPIKE:
            return f"the loss of batch {self.batch_index}, {self.loss:.6g}, is far above the {self.expected:.6g} expected"
        if self.status is UpdateStatus.BROKE_STATE:
            return f"after the update of batch {self.batch_index} values of the state are infinite or NaN (loss {self.loss:.6g})"
        return f"batch {self.batch_index} has a non-finite loss or gradient (loss {self.loss:.6g})"


@dataclass(frozen=True)
class Decision:
    anomaly: Anomaly
    action: Literal["raise", "skip", "rollback"]
    skipped_batches: tuple[int, ...] = ()
    """The batches that are skipped because of this anomaly, and were not skipped before."""
    go_back_to: int | None = None
    """For a rollback: the greatest batch index of a state that may be restored."""
    error: str = ""
    """For "raise": the message for the user."""
    origin: str = ""
    """Where the first value that is not finite was made; empty: not looked for."""

    def event(self) -> AnomalyFields:
        """Returns the fields of the `anomaly` event. JSON has no NaN: a loss that is not finite becomes null."""
        anomaly = self.anomaly
        found: AnomalyFields = {
            "kind": anomaly.kind,
            "batch_index": anomaly.batch_index,
            "loss": _or_none(anomaly.loss),
            "expected": _or_none(anomaly.expected),
            "action": self.action,
            "skipped_batches": list(self.skipped_batches),
        }
        return {**found, "origin": self.origin} if self.origin else found


def decide(anomaly: Anomaly, config: AnomalyConfig, skipped: Collection[int]) -> Decision:
    """Returns what the configuration asks for. `skipped` are the batches skipped so far, or to be skipped when they come.

    Only those among the last `skipped_window_batches` before the offending batch count towards `max_skipped`. They are counted
    by index, so that a restart, or another number of hosts, comes to the same decision.
    """
    broke = anomaly.status is UpdateStatus.BROKE_STATE
    policy = config.loss_spike if anomaly.status is UpdateStatus.LOSS_SPIKE else config.non_finite
    if policy == "raise":
        done = "" if broke else "; its update was not applied"
        return Decision(anomaly, "raise", error=f"{anomaly}{done}: {ADVICE[anomaly.status]}")
    last = anomaly.batch_index
    # A batch before the offending one may have done the damage. Its update can be left out only by going back.
    first = max(0, last - config.skip_before) if policy == "rollback" else last
    # A batch that is skipped already is reported, and counts, only once.
    new = tuple(batch for batch in range(first, last + 1) if batch not in skipped)
    if broke and not new:  # left out before, and broken all the same: going back would never end
        return Decision(anomaly, "raise", error=f"{anomaly}, though the batch was left out: {WAYS_OUT}")
    # A bound in batches and not in time: it is the same after a restart.
    window = range(last + 1 - config.skipped_window_batches, last + 1)
    recent = sorted({*new, *skipped}.intersection(window))
    if len(recent) > config.max_skipped:
        error = (
            f"{anomaly}; with it {len(recent)} of the last {len(window):,} batches would be skipped (anomalies.max_skipped = "
            f"{config.max_skipped}): {shown(recent)}; look at their data, or {WAYS_OUT}"
        )
        return Decision(anomaly, "raise", error=error)
    # An update that was applied can be left out only by going back.
    if policy == "rollback" or broke:
        return Decision(anomaly, "rollback", new, go_back_to=first)
    return Decision(anomaly, "skip", new)


WAYS_OUT = "lower the learning rate, or look at the optimizer's settings (eps)"
ADVICE = {
    UpdateStatus.NON_FINITE: "look at its data and lower the learning rate, or set anomalies.non_finite to skip or rollback",
    UpdateStatus.LOSS_SPIKE: "look at its data and lower the learning rate, or raise anomalies.spike_zscore",
    UpdateStatus.BROKE_STATE: (
        "lower the learning rate, look at the optimizer's settings (eps), or set anomalies.non_finite to skip or rollback"
    ),
}


def scale_exhausted(batch_index: int, loss: float) -> str:
    """Returns the error message for a batch with the status SCALE_EXHAUSTED."""
    return (
        f"the gradients of batch {batch_index} (loss {loss:.6g}) overflow float16, and the scale of the loss is as small as it "
        "may be (loss_scale.minimum); the update was not applied: lower the learning rate, train with dtype bfloat16, or lower "
        "loss_scale.minimum"
    )


def shown(batches: list[int]) -> str:
    """Returns the first SHOWN_BATCHES of them, and how many more there are."""
    more = f" and {len(batches) - SHOWN_BATCHES} more" if len(batches) > SHOWN_BATCHES else ""
    return ", ".join(map(str, batches[:SHOWN_BATCHES])) + more


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
