"""How much of its machine's processors and memory a host uses. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CPU, PROCESS_MEMORY = "host_cpu_percent", "process_memory_bytes"
MEMORY, TOTAL_MEMORY = "host_memory_bytes", "host_memory_total_bytes"
NAMES = (CPU, MEMORY, TOTAL_MEMORY, PROCESS_MEMORY)


class HostUsage:
    """Reads the usage of this machine and of this process. One thread must make all calls: psutil counts for each by itself."""

    def __init__(self) -> None:
        import psutil

        self._psutil, self._process = psutil, psutil.Process()
        # Begins the interval of the first reading, which would be 0 without it.
        psutil.cpu_percent(None)

    def read(self) -> dict[str, float]:
        """Returns the values by name; the CPU time is that since the last reading. Waits for nothing."""
        memory = self._psutil.virtual_memory()
        return {
            CPU: self._psutil.cpu_percent(None),
            # What is available counts as free: the cache of files is given back when memory is short.
            MEMORY: float(memory.total - memory.available),
            TOTAL_MEMORY: float(memory.total),
            PROCESS_MEMORY: float(self._process.memory_info().rss),
        }


def largest(usages: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the largest value of each name over several hosts."""
    every = list(usages)
    return {name: max(usage[name] for usage in every if name in usage) for name in NAMES if any(name in u for u in every)}
