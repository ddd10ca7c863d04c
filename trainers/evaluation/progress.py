"""How far an evaluation is, and how fast it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from trainers import runtime

TELL_EVERY_S = 1.0
"""The shortest time between two events of progress."""
FORWARD_PART = 1 / 3
"""The part of `flops_per_token` that is the forward pass: the backward pass takes twice as much."""


def reported(unit: str, batches: Iterable[Any], total: int | None, clock: Callable[[], float] = time.monotonic) -> Iterator[Any]:
    """Yields the batches, and reports how many were given to the devices. Waits for none of them."""
    host, noted_s = runtime.current(), clock()
    for done, batch in enumerate(batches, 1):
        yield batch
        # On every host, for its own watchdog: the heartbeats bring it.
        host.evaluated_batches += 1
        if clock() - noted_s >= TELL_EVERY_S:
            noted_s = clock()
            if jax.process_index() == 0:
                host.emit({"ev": "evaluating", "unit": unit, "done": done, "total": total})


@dataclass
class Stopwatch:
    """The time of an evaluation, without what it took to compile."""

    clock: Callable[[], float] = time.perf_counter
    since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.since_s = self.clock()

    def rates(self, counts: dict[str, float], flops_per_example: float, num_devices: int) -> dict[str, float]:
        """Returns the rates of the `tokens` and `samples` since the stopwatch was started, and starts it again."""
        now_s = self.clock()
        # Never 0: a clock may not have moved.
        seconds, self.since_s = max(now_s - self.since_s, 1e-9), now_s
        rates = {"seconds": seconds} | {f"{name}_per_s": count / seconds for name, count in counts.items()}
        if flops_per_example and "samples" in counts:
            flops = flops_per_example * FORWARD_PART * rates["samples_per_s"] / num_devices
            rates["tflops_per_s_per_device"] = flops / 1e12
        return rates

    def leave_out(self, since_s: float) -> None:
        """Does not count the time since `since_s`."""
        self.since_s += self.clock() - since_s
