"""Whether a compiled step has room on a device, where the compiler itself knows no limit: on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.hosts import config as hosts_config
from cluster.hosts.config import HostsConfig
from orchestrator.planning.hardware import Hardware
from trainers.metrics.host_usage import bytes_of_machine

DOES_NOT_FIT = "does not fit in the memory"
"""What the compiler for TPUs says (`trainers.planning.program`), and what is said here."""


@dataclass(frozen=True)
class Room:
    of_device: float
    """Bytes."""
    counted: str
    """Which number of a compiled step must be below it: its `peak`, or its `arguments` alone where the peak is an upper bound."""
    source: str
    """Where the limit comes from, for people."""

    def lacks(self, memory: Mapping[str, int]) -> str:
        """Returns why a step that needs this memory does not fit; empty if it does."""
        need = memory[self.counted]
        if need <= self.of_device:
            return ""
        what = "at its peak" if self.counted == "peak" else "for state and batch alone"
        gigabytes = f"{need / 1e9:.3g} GB {what}, and a device has {self.of_device / 1e9:.3g} GB"
        return f"the step {DOES_NOT_FIT} of a device: it needs {gigabytes} ({self.source})"


def room(hosts: HostsConfig, device: Hardware | None) -> Room | None:
    """Returns the room of a device; None where nothing is known of it. On CPUs it is a share of this machine's memory, unless the
    hosts are on machines of their own. The compiler for CPUs, which stands for that of GPUs, needs more for what is temporary."""
    if hosts.kind == "cpu":
        if hosts_config.spreads(hosts):
            return None
        devices = hosts_config.num_devices(hosts)
        return Room(bytes_of_machine() / devices, "peak", f"{devices} share this machine")
    if device is None:
        return None
    return Room(device.memory_bytes, "arguments" if hosts.kind == "gpu" else "peak", device.name)
