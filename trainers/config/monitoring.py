"""What is recorded of a run, and what is done about batches that are bad."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainers.config.section import Section, require, require_none, too_small


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig(Section):
    """What to do about a batch whose loss or gradient is not finite, or whose loss leaps up. Its update is never applied."""

    non_finite: Literal["raise", "skip", "rollback"] = "skip"
    """raise: the run fails; skip: it goes on with the next batch; rollback: it goes back to a checkpoint before the batch."""
    loss_spike: Literal["off", "raise", "skip", "rollback"] = "off"
    spike_zscore: float = 6.0
    """A spike is a loss this many standard deviations above its running mean, both over the updates that were applied."""
    spike_warmup_steps: int = 50
    """Updates before the first one that can be a spike."""
    spike_decay: float = 0.98
    """Of the running mean and variance: the weight of the past at each update."""
    skip_before: int = 0
    """How many batches before the offending one a rollback leaves out with it."""
    max_skipped: int = 100
    """Of any `skipped_window_batches` batches in a row. One more, and the run fails: the fault is not in the data."""
    skipped_window_batches: int = 10_000
    """What was skipped longer ago does not count: a run of any length may come upon a bad batch now and then."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 0, "skip_before", "max_skipped")
        yield from too_small(self, 1, "spike_warmup_steps", "skipped_window_batches")
        if not self.spike_zscore > 0:
            yield f"spike_zscore = {self.spike_zscore}: expected a positive number"
        if not 0 < self.spike_decay < 1:
            yield f"spike_decay = {self.spike_decay}: expected 0 < spike_decay < 1"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """See `docs/metrics.md`."""

    per_parameter_grad_norm: bool = False
    peak_flops_per_s: float | None = None
    """Of one device, for `mfu`; default: as known of its kind (`trainers/metrics/peak_flops.py`)."""

    def __post_init__(self):
        if self.peak_flops_per_s is not None:
            require(self.peak_flops_per_s > 0, f"peak_flops_per_s = {self.peak_flops_per_s}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class DistributionConfig(Section):
    """Histogram, mean, deviation and extremes of parameters and their gradients, for the recorders that take them."""

    pattern: str | None = None
    """Which parameters: a regular expression that is searched in names such as `layers/attention/query`; `.`: all; null: none."""
    every_steps: int = 100
    bins: int = 64

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "every_steps")
        yield from too_small(self, 2, "bins")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            yield f"pattern = {self.pattern!r}: expected a regular expression, or null ({error})"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """A window of steps that JAX's profiler records, below `profile` in the run's folder; more at any time by
    `python -m orchestrator.profile`. Skips, then `repeat` times: waits, warms up, records."""

    record_steps: int | None = None
    """null: nothing is recorded on schedule."""
    skip_steps: int = 0
    """Of this process, at first."""
    wait_steps: int = 0
    warmup_steps: int = 1
    """Steps that are traced and thrown away: what the start of the tracer costs is not to be seen in the record."""
    repeat: int = 1
    hosts: tuple[int, ...] = (0,)

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "record_steps", "repeat")
        yield from too_small(self, 0, "skip_steps", "wait_steps", "warmup_steps")
        if self.repeat > 1 and self.wait_steps < 2:
            yield (
                f"wait_steps = {self.wait_steps}: expected at least 2 with repeat = {self.repeat}: the last steps of a "
                "window are still running when the next ones are begun"
            )
        if not self.hosts or min(self.hosts) < 0:
            yield f"hosts = {list(self.hosts)}: expected at least one host, counted from 0"
