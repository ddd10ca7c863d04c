"""What is asked of a deployment: a target, what a configuration does not say of it, and what clouds call its machines. Pure.

TPU: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (labels of nodes, types of machines) and
https://cloud.google.com/tpu/docs/runtimes (runtime versions). GPU: https://cloud.google.com/compute/docs/gpus and
https://aws.amazon.com/ec2/instance-types (GPUs of a machine).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Target(NamedTuple):
    about: str
    kinds: tuple[str, ...]
    """Of `hosts.kind`."""
    templates: tuple[tuple[str, str], ...]
    """Files, and the templates in `configs/deploy/` that they are made from."""
    needs: tuple[str, ...] = ()
    """Options that must be given."""
    takes: tuple[str, ...] = ()
    """Options that may be given."""


IN_IMAGES = (("Dockerfile", "Dockerfile.jinja"), ("Dockerfile.dockerignore", "Dockerfile.dockerignore.jinja"))
ON_KUBERNETES = (("rayjob.yaml", "rayjob.yaml.jinja"), ("raycluster.yaml", "raycluster.yaml.jinja"), *IN_IMAGES)
TARGETS = {
    "kuberay": Target("Kubernetes with KubeRay, GPUs or CPUs", ("gpu", "cpu"), ON_KUBERNETES, ("image",)),
    "gke-tpu": Target("Google's Kubernetes with KubeRay, TPU slices", ("tpu",), ON_KUBERNETES, ("image",), ("spot",)),
    "tpu-vm": Target(
        "TPU VMs by queued resources", ("tpu",), (("tpu_vm.sh", "tpu_vm.sh.jinja"),), ("project", "zone"), ("spot",)
    ),
    "slurm": Target("an allocation of SLURM", ("gpu", "cpu"), (("run.sh", "slurm.sh.jinja"),)),
    "ray-cluster": Target(
        "Ray's cluster launcher, on machines of Google or Amazon",
        ("tpu", "gpu", "cpu"),
        (("cluster.yaml", "launcher.yaml.jinja"),),
        ("zone",),
        ("spot", "project", "machine"),
    ),
}
"""By the word after `--to`."""


@dataclass(frozen=True)
class Request:
    """The options of the command. An option that was not given is None, or False."""

    config: Path
    """The file of the configuration."""
    to: str
    out: Path
    image: str | None = None
    project: str | None = None
    zone: str | None = None
    machine: str | None = None
    spot: bool = False

    @property
    def target(self) -> Target:
        return TARGETS[self.to]

    @property
    def is_amazon(self) -> bool:
        """Whether the machines are Amazon's: its types have a dot (`p5.48xlarge`), Google's have none."""
        return "." in (self.machine or "")


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
