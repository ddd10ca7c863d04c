"""What a compiled program needs of a device's memory, and how much there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from trainers.metrics.host_usage import bytes_of_machine
from trainers.runtime import multihost

SHARE = 0.95
"""The share of an accelerator's memory that one program may need: batches that are read ahead and the other programs have the
rest."""


class DoesNotFit(Exception):
    """No program that was tried has room on a device."""


@dataclass(frozen=True)
class Room:
    num_bytes: int
    source: str
    """Where the limit comes from, for people."""


def of_program(program: jax.stages.Compiled, platform: str) -> Mapping[str, int]:
    """Returns the bytes of a device that the program needs: at its peak, for its arguments, and for what is temporary; and the
    bytes of its host's memory."""
    found: Any = program.memory_analysis()
    arguments, temporary = found.argument_size_in_bytes, found.temp_size_in_bytes
    host = found.host_argument_size_in_bytes + found.host_temp_size_in_bytes
    # The compiler for CPUs does not count what is temporary. That for TPUs counts the host's memory, too: of a program that needs
    # 10 GB of each it tells 20 GB, and compiles it for a device of 16 GB.
    told = found.peak_memory_in_bytes - found.host_argument_size_in_bytes if platform == "tpu" else arguments + temporary
    return {"peak": min(told, arguments + temporary), "arguments": arguments, "temporary": temporary, "host": host}


def room() -> Room:
    """Returns the room of the device that has least, of all hosts. All hosts must call this."""
    limits = [stats["bytes_limit"] for device in jax.local_devices() if "bytes_limit" in (stats := device.memory_stats() or {})]
    if limits:
        own, source = int(SHARE * min(limits)), f"{SHARE:.0%} of its memory"
    else:
        own, source = bytes_of_machine() // jax.device_count(), f"the memory of this machine, which {jax.device_count()} share"
    return Room(min(multihost.all_hosts("memory of a device", own)), source)
