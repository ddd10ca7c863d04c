"""What is asked of a deployment: a target, and what a configuration does not say of it. Pure."""

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
