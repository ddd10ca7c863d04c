"""What a device of each kind can do, how much of it training reaches, and whether a compiled step has room on one. Figures of the
vendors, and of published runs.

TPU: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e. NVIDIA: the data sheets of A100, H100 and H200 (SXM). The peaks are
those that the metric `mfu` is computed from. What training reaches is the middle of published utilizations of dense models in
bfloat16: of MaxText's and AXLearn's for TPUs, of both and of Megatron's for GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.hosts import config as hosts_config
from gangway.config.section import did_you_mean
from trainers.metrics.host_usage import bytes_of_machine
from trainers.metrics.peak_flops import peak_flops_per_s

GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """One JAX device: a chip, or one of the cores of a chip that are programmed one by one."""

    name: str
    peak_flops_per_s: float
    """In bfloat16, dense."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To the other devices of its slice or machine, in one direction, over all links."""
    network_bytes_per_s: float
    """Beyond its slice or machine: its share of the network of its machine."""
    reached: float
    """The share of the peak that published runs reach where nothing is waited for."""
    spread: tuple[float, float]
    """The least and the greatest of the published shares."""


def _peak(kind: str) -> float:
    """`kind` is JAX's name of the device."""
    peak = peak_flops_per_s(kind, "bfloat16")
    assert peak is not None, kind
    return peak


DEVICES = {
    hardware.name: hardware
    for hardware in (
        Hardware("v4", _peak("TPU v4"), 32 * GB, 1228 * GB, 270 * GB, 3 * GB, 0.57, (0.52, 0.62)),
        Hardware("v5e", _peak("TPU v5 lite"), 16 * GB, 819 * GB, 200 * GB, 3 * GB, 0.63, (0.60, 0.67)),
        Hardware("v5p", _peak("TPU v5p"), 95 * GB, 2765 * GB, 600 * GB, 6 * GB, 0.67, (0.64, 0.71)),
        Hardware("v6e", _peak("TPU v6 lite"), 32 * GB, 1640 * GB, 448 * GB, 6 * GB, 0.443, (0.38, 0.51)),
        Hardware("a100", _peak("A100"), 80 * GB, 2039 * GB, 300 * GB, 25 * GB, 0.50, (0.43, 0.56)),
        Hardware("h100", _peak("H100"), 80 * GB, 3350 * GB, 450 * GB, 50 * GB, 0.46, (0.38, 0.55)),
        Hardware("h200", _peak("H200"), 141 * GB, 4800 * GB, 450 * GB, 50 * GB, 0.46, (0.38, 0.55)),
    )
}
TPU, GPU = ("v4", "v5e", "v5p", "v6e"), ("a100", "h100", "h200")
_TPU = re.compile(r"(v\d\w*)-(\d+)(?:x(\d+))?")
_GPU = re.compile(r"(\w+)-(\d+)x(\d+)")


def overrides_for(name: str) -> list[str]:
    """Returns the settings of `hosts` for machines that are named: `v5e-256` (chips of a slice), `v5p-512x4` (of four slices),
    `h100-8x16` (8 GPUs on each of 16 machines). Raises ValueError for another name."""
    word = name.lower().partition("-")[0]
    if word in TPU and (match := _TPU.fullmatch(name.lower())) is not None:
        chips, slices = int(match[2]), int(match[3] or 1)
        return [
            "hosts.kind=tpu",
            f"hosts.accelerator={word}",
            f"hosts.topology={topology_of(word, chips)}",
            f"hosts.slices={slices}",
            "hosts.count=null",
            "hosts.devices_per_host=null",
        ]
    if word in GPU and (match := _GPU.fullmatch(name.lower())) is not None:
        return ["hosts.kind=gpu", f"hosts.count={match[3]}", f"hosts.devices_per_host={match[2]}"]
    example = f"{word}-256" if word in TPU else f"{word}-8x16" if word in GPU else "v5e-256 or h100-8x16"
    raise ValueError(f"--on {name}: expected a name such as {example}{did_you_mean(word, DEVICES)}; known: {', '.join(DEVICES)}")


def topology_of(generation: str, chips: int) -> str:
    """Returns the most square topology of so many chips: two sizes for v5e and v6e, three for the others. Raises ValueError if
    there is none."""
    if chips < 1 or chips & (chips - 1):
        raise ValueError(f"--on {generation}-{chips}: expected a power of two of chips")
    sides = [1] * (2 if generation in ("v5e", "v6e") else 3)
    while chips > 1:
        sides[sides.index(min(sides))] *= 2
        chips //= 2
    # As topologies are called: 2x2x1, 2x2x4.
    return "x".join(map(str, [*sorted(side for side in sides if side > 1), *(side for side in sides if side == 1)]))


def of(kind: str, accelerator: str | None, given: str | None) -> Hardware | None:
    """Returns the hardware of a configuration; `given` is the name that was asked for. None: there are no figures for it."""
    word = (given or accelerator or "").lower().partition("-")[0].removeprefix("tpu")
    word = {"v5litepod": "v5e", "v5lite": "v5e"}.get(word, word)
    return DEVICES.get(word) if kind != "cpu" else None


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


def room(hosts: hosts_config.HostsConfig, device: Hardware | None) -> Room | None:
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
