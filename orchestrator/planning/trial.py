"""The time of a step on CPUs: measured in some seconds on the machine that plans, by processes like those of the run."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cluster.hosts import config as hosts_config
from cluster.hosts.process_env import process_env
from orchestrator.config.job import JobConfig
from orchestrator.planning.child import Child

MAX_FLOPS = 1e12
"""Of a step: more takes a core half a minute, and a trial takes some ten steps."""
MAX_PROCESSES_PER_CORE = 4
MAX_SHARE_OF_MEMORY = 0.5
"""Of what is available: nothing else of this machine may be pushed out."""


@dataclass(frozen=True)
class Trial:
    """The seconds of a step. The fastest window is what the machine can do; the others say how busy it was."""

    fastest_s: float
    slowest_s: float


class NotTried(Exception):
    """The step cannot be measured here; the message says why."""


def of(config: JobConfig, *, flops: float, peak_bytes: float) -> Trial:
    """Returns what a trial of the run's hosts measures. `flops` are those of a whole step, `peak_bytes` the memory of a device.
    Raises NotTried, ConfigError and PlanError."""
    hosts, devices = hosts_config.num_hosts(config.hosts), hosts_config.num_devices(config.hosts)
    if why := why_not(flops, devices * peak_bytes, hosts, hosts_config.spreads(config.hosts)):
        raise NotTried(why)
    from cluster.agent.machine import free_port  # imports Ray

    coordinator = f"127.0.0.1:{free_port()}"
    with ExitStack() as ended:
        cache = ended.enter_context(tempfile.TemporaryDirectory())
        children = []
        for host in range(hosts):
            asked = {"host": host, "num_hosts": hosts, "coordinator": coordinator}
            child = Child("trainers.planning.trial", config, asked, process_env(config.hosts, host, cache))
            children.append(ended.enter_context(child))
        return trial_of([child.facts()["step_s"] for child in children])


def why_not(flops: float, whole_bytes: float, hosts: int, spread: bool) -> str:
    """Returns why the hosts cannot be tried on this machine; empty if they can."""
    if spread:
        return "hosts.spread puts the hosts on machines of their own, and a trial has only this one"
    if flops > MAX_FLOPS:
        return f"a step of {flops / 1e12:.3g} TFLOP takes too long to be tried ({MAX_FLOPS / 1e12:g} at most)"
    most = MAX_PROCESSES_PER_CORE * _cores()
    if hosts > most:
        return f"{hosts} hosts are too many for this machine ({most} at most)"
    if whole_bytes > MAX_SHARE_OF_MEMORY * (free := _free_bytes()):
        return f"the hosts need {whole_bytes / 1e9:.3g} GB, more than half of the {free / 1e9:.3g} GB that are free here"
    return ""


def trial_of(windows: list[list[float]]) -> Trial:
    """Returns the trial of the windows of each host: a step takes as long as on the slowest host."""
    steps = [max(of_hosts) for of_hosts in zip(*windows, strict=True)]
    return Trial(min(steps), max(steps))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_bytes() -> Any:
    import psutil

    return psutil.virtual_memory().available
