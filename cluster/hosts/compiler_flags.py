"""The flags that XLA gets by default on hosts of each kind, each with its reason and its source. Pure.

Of two settings of a flag the last one counts. So these come first: what the user or the machine sets comes over them. They are in
the environment of the training processes, which is a part of the key of kept programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cluster.hosts.config import HostsConfig, max_slices

VARIABLES = {"gpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS"}
"""Where XLA reads its flags, by the kind of the hosts."""
DEFAULTS_OF = {name: f"GANGWAY_{name}" for name in VARIABLES.values()}
"""The variables in which an agent gets the defaults: it puts the flags of its machine behind them."""


class Flag(NamedTuple):
    name: str
    value: str
    why: str
    source: str

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


ON_GPUS = (
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        "true",
        "begins exchanges early enough that products hide them",
        "the images of NVIDIA's JAX Toolbox",
    ),
)
BETWEEN_SLICES = (
    Flag(
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "true",
        "sums the gradients of several slices over their network while the step goes on",
        "MaxText: xla_flags_library.py",
    ),
    Flag(
        "xla_tpu_data_parallel_opt_different_sized_ops",
        "true",
        "the same for gradients of different sizes, across iterations of a loop",
        "MaxText: xla_flags_library.py",
    ),
)
"""Asynchronous exchanges within a slice are on by libtpu's own defaults."""


def of_hosts(config: HostsConfig) -> tuple[Flag, ...]:
    """Returns the flags that the training processes get, without those that `hosts.env` sets itself."""
    if not config.compiler_flags or config.kind not in VARIABLES:
        return ()
    of_kind = ON_GPUS if config.kind == "gpu" else BETWEEN_SLICES if max_slices(config) > 1 else ()
    own = config.env.get(VARIABLES[config.kind], "")
    return tuple(flag for flag in of_kind if f"--{flag.name}" not in (word.partition("=")[0] for word in own.split()))


def defaults_env(config: HostsConfig) -> dict[str, str]:
    """Returns the defaults as a variable of an agent (see `joined`); empty without any."""
    flags = " ".join(map(str, of_hosts(config)))
    return {DEFAULTS_OF[VARIABLES[config.kind]]: flags} if flags else {}


def joined(kept: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the changes of an environment, with the flags of XLA in one variable each: the defaults, those of the environment
    that is kept, and those of the changes."""
    found = {name: value for name, value in changes.items() if name not in DEFAULTS_OF.values()}
    for name, of_defaults in DEFAULTS_OF.items():
        if flags := " ".join(filter(None, (changes.get(of_defaults), kept.get(name), changes.get(name)))):
            found[name] = flags
    return found
