"""What clouds call the machines that a configuration asks for. Pure.

TPU: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (labels of nodes, types of machines) and
https://cloud.google.com/tpu/docs/runtimes (runtime versions). GPU: https://cloud.google.com/compute/docs/gpus and
https://aws.amazon.com/ec2/instance-types (GPUs of a machine).
"""

from __future__ import annotations

from typing import NamedTuple


class TpuNames(NamedTuple):
    gke: str
    """The label `cloud.google.com/gke-tpu-accelerator` of a node."""
    machine: str
    """The type of a node, without the number of its chips: `ct6e-standard-4t` has four."""
    cloud: str
    """In the type of a TPU VM: `v5litepod-16`."""
    runtime: str
    """The system of a TPU VM."""


TPUS = {
    "v4": TpuNames("tpu-v4-podslice", "ct4p-hightpu", "v4", "tpu-ubuntu2204-base"),
    "v5litepod": TpuNames("tpu-v5-lite-podslice", "ct5lp-hightpu", "v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": TpuNames("tpu-v5p-slice", "ct5p-hightpu", "v5p", "v2-alpha-tpuv5"),
    "v6e": TpuNames("tpu-v6e-slice", "ct6e-standard", "v6e", "v2-alpha-tpuv6e"),
    "v7x": TpuNames("tpu7x", "tpu7x-standard", "tpu7x", "v2-alpha-tpu7-ubuntu2404"),
}
"""By the generation as Ray spells it."""

GPUS_OF_MACHINES = {
    **{f"a2-highgpu-{count}g": count for count in (1, 2, 4, 8)},
    **{f"a2-ultragpu-{count}g": count for count in (1, 2, 4, 8)},
    **{f"a3-highgpu-{count}g": count for count in (1, 2, 4, 8)},
    **dict.fromkeys(("a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g"), 8),
    **dict.fromkeys(("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge"), 8),
    "p5.4xlarge": 1,
}
"""GPUs of a machine, by its type."""
