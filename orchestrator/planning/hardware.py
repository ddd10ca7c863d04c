"""What a device of each kind can do, and how much of it training reaches. Figures of the vendors, and of published runs.

TPU: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e. NVIDIA: the data sheets of A100, H100 and H200 (SXM). The peaks are
those that the metric `mfu` is computed from. What training reaches is the middle of published utilizations of dense models in
bfloat16: of MaxText's and AXLearn's for TPUs, of both and of Megatron's for GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gangway.config.section import did_you_mean
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
