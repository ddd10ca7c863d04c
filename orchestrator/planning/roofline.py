"""How long a step will take, and what a run will cost, by arithmetic alone. Pure.

A step takes as long as the slowest of three: the products at the share of the peak that published runs reach, the memory traffic
of the state, and what the devices exchange. The exchanges of data parallelism overlap with the products, so the largest counts
and not the sum. See `orchestrator.planning.hardware` for the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.planning.hardware import Hardware

DEVICE_HOURS_BETWEEN_FAILURES = 50_000.0
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783)."""
RECOVERY_S = 60.0
"""From a failure to the next first step, on real machines: an assumption, on the safe side of this project's measured seconds."""
DAY_S, HOUR_S = 86400.0, 3600.0


@dataclass(frozen=True)
class Work:
    """What one device does in a step."""

    flops: float
    state_bytes: float
    """Of parameters, moments and the rest."""
    exchanged_bytes: float
    """With other devices of its slice or machine."""
    network_bytes: float = 0.0
    """With devices of other slices or machines."""


@dataclass(frozen=True)
class StepTime:
    compute_s: float
    memory_s: float
    exchange_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s, self.exchange_s)

    @property
    def bound_by(self) -> str:
        by_s = {"products": self.compute_s, "memory": self.memory_s, "exchanges": self.exchange_s}
        return max(by_s, key=lambda name: by_s[name])


def step_time(work: Work, hardware: Hardware) -> StepTime:
    return StepTime(
        work.flops / (hardware.peak_flops_per_s * hardware.reached),
        2 * work.state_bytes / hardware.memory_bytes_per_s,  # read and written
        # One after the other: what a slice has summed is summed over the slices.
        work.exchanged_bytes / hardware.link_bytes_per_s + work.network_bytes / hardware.network_bytes_per_s,
    )


def summed_over_slices(gradient_bytes: float, slices: int) -> float:
    """Returns how much a device sends to sum its share of the gradients over the slices: a reduce-scatter and an all-gather, in
    each of which it sends all parts but its own."""
    return 2 * gradient_bytes * (slices - 1) / slices


def over_links(exchanged: Mapping[str, float]) -> float:
    """Returns the bytes that a device sends in a step, of those that it has after each kind of exchange. An all-reduce is a
    reduce-scatter and an all-gather."""
    return sum(2 * size if kind == "all-reduce" else size for kind, size in exchanged.items())


def utilization(work: Work, hardware: Hardware) -> float:
    """Returns the MFU that is expected."""
    return work.flops / (hardware.peak_flops_per_s * step_time(work, hardware).seconds)


def expected_goodput(
    num_devices: int, save_every_s: float, *, hours_between_failures: float | None = None, recovery_s: float = RECOVERY_S
) -> float:
    """Returns the share of the wall clock in steps that are not repeated. `hours_between_failures`: of the whole run; None: by
    the number of devices. A failure costs its recovery, and in the mean half of what was trained since the last save."""
    hours = DEVICE_HOURS_BETWEEN_FAILURES / num_devices if hours_between_failures is None else hours_between_failures
    lost_s = recovery_s + save_every_s / 2
    between_s = hours * HOUR_S
    return between_s / (between_s + lost_s)


def best_save_interval_s(num_devices: int, save_s: float, hours_between_failures: float | None = None) -> float:
    """Returns the time between saves that loses least (J. W. Young, 1974: the square root of twice the cost of a save times the
    mean time between failures). `save_s` is how long a save holds up training."""
    hours = DEVICE_HOURS_BETWEEN_FAILURES / num_devices if hours_between_failures is None else hours_between_failures
    return math.sqrt(2 * save_s * hours * HOUR_S)
