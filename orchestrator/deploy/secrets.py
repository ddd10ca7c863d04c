"""What of a configuration must be in no file: which variables are secrets, and which other keys have one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cluster.hosts.environment import OVERWRITTEN, is_among
from orchestrator.config.job import JobConfig, shown, to_dict

PUBLIC = dict.fromkeys(
    ("XLA_*", "LIBTPU_*", "NCCL_*", "JAX_*", "TPU_*", "TF_CPP_*", "CUDA_*", "OMP_*", "GANGWAY_*", "GRPC_*", *OVERWRITTEN), ""
)
"""Variables of `hosts.env` that are settings of libraries. They stay in the configuration: all others are taken for secrets."""


def variables(config: JobConfig) -> tuple[str, ...]:
    """Returns the names of the variables of `hosts.env` that only their machines may know."""
    return tuple(name for name in config.hosts.env if not is_among(name, PUBLIC))


def problems(config: JobConfig) -> Iterator[str]:
    """Yields a line for each secret that a deployment has no place for."""
    if "RAY_AUTH_TOKEN" in config.hosts.env:
        yield "hosts.env.RAY_AUTH_TOKEN: leave it out: a deployment makes the token of its cluster, and keeps it in no file"
    for key in _differing(to_dict(config), shown(config)):
        if not key.startswith("hosts.env."):
            advice = {
                "notify.webhook": "use notify.command instead, with a variable of hosts.env: [sh, -c, 'curl ... \"$WEBHOOK\"']",
                "tracking.uri": "leave the user out, and give MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in hosts.env",
            }
            way_out = advice.get(key, "give it by a variable of hosts.env")
            yield f"{key}: it holds a secret, which no file of a deployment may; {way_out}"


def _differing(full: Any, masked: Any, name: str = "") -> Iterator[str]:
    """Yields the keys of what masking has changed."""
    if isinstance(full, Mapping):
        for key, value in full.items():
            yield from _differing(value, masked[key], f"{name}.{key}" if name else str(key))
    elif full != masked:
        yield name
