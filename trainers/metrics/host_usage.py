"""How much of its machine a host uses: processors, memory, disks, networks. Free of JAX."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

CPU, PROCESS_MEMORY = "host_cpu_percent", "process_memory_bytes"
MEMORY, TOTAL_MEMORY = "host_memory_bytes", "host_memory_total_bytes"
DISK_READ, DISK_WRITTEN = "host_disk_read_bytes_per_s", "host_disk_written_bytes_per_s"
RECEIVED, SENT = "host_network_received_bytes_per_s", "host_network_sent_bytes_per_s"
RATES = (DISK_READ, DISK_WRITTEN, RECEIVED, SENT)
NAMES = (CPU, MEMORY, TOTAL_MEMORY, PROCESS_MEMORY, *RATES)
RATE_EVERY_S = 1.0
"""A rate is that of at least so long; readings that come sooner tell it again."""


def bytes_of_machine() -> int:
    """Returns the size of this machine's memory."""
    import psutil

    return psutil.virtual_memory().total


def bytes_available(cgroup: str = "/sys/fs/cgroup") -> float:
    """Returns how much memory a process can still get: of this machine, and of the limit of its container, if it sees one."""
    import psutil

    left = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no limit is the word max
        limit, used = (int(Path(cgroup, name).read_text()) for name in ("memory.max", "memory.current"))
        cache = re.search(r"^inactive_file (\d+)", Path(cgroup, "memory.stat").read_text(), re.MULTILINE)
        left = min(left, limit - used + (int(cache[1]) if cache else 0))
    return left


class HostUsage:
    """Reads the usage of this machine and of this process. One thread must make all calls: psutil counts for each by itself."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        import psutil

        self._psutil, self._process = psutil, psutil.Process()
        # Begins the interval of the first reading, which would be 0 without it.
        psutil.cpu_percent(None)
        self._monotonic = monotonic
        self._counted_s, self._counts = monotonic(), self._count()
        self._rates: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Returns the values by name; the CPU time is that since the last reading. Waits for nothing."""
        memory = self._psutil.virtual_memory()
        return {
            CPU: self._psutil.cpu_percent(None),
            # What is available counts as free: the cache of files is given back when memory is short.
            MEMORY: float(memory.total - memory.available),
            TOTAL_MEMORY: float(memory.total),
            PROCESS_MEMORY: float(self._process.memory_info().rss),
            **self._rates_now(),
        }

    def _rates_now(self) -> dict[str, float]:
        now_s = self._monotonic()
        if (passed_s := now_s - self._counted_s) >= RATE_EVERY_S:
            counts = self._count()
            # A counter that is gone, or was set back, has no rate.
            known = [name for name in counts if counts[name] >= self._counts.get(name, float("inf"))]
            self._rates = {name: (counts[name] - self._counts[name]) / passed_s for name in known}
            self._counted_s, self._counts = now_s, counts
        return self._rates

    def _count(self) -> dict[str, float]:
        """Returns the bytes since the machine began; without what the machine does not count, as in some containers."""
        counts: dict[str, float] = {}
        with suppress(OSError, RuntimeError, NotImplementedError):
            if disks := self._psutil.disk_io_counters():
                counts |= {DISK_READ: disks.read_bytes, DISK_WRITTEN: disks.write_bytes}
        with suppress(OSError, RuntimeError, NotImplementedError):
            if networks := self._psutil.net_io_counters():
                counts |= {RECEIVED: networks.bytes_recv, SENT: networks.bytes_sent}
        return counts


def largest(usages: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the largest value of each name over several hosts."""
    every = list(usages)
    return {name: max(usage[name] for usage in every if name in usage) for name in NAMES if any(name in u for u in every)}
