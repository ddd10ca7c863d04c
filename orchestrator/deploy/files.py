"""Fills the templates of `configs/deploy/` from a configuration."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
import zlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from cluster.hosts import config as hosts_config
from cluster.hosts.tpu import generation
from gangway.config import yaml_source
from gangway.storage import documents, durable
from orchestrator.config.job import ConfigError, JobConfig, among, given, to_dict
from orchestrator.deploy import refusals
from orchestrator.deploy.request import TPUS, Request
from orchestrator.shipped.files import CONFIGS, folder_of

SAVE_S = 300
"""How long a run that is asked to stop has to save, before a time limit or a kill."""
LONGEST_NAME = 40
"""KubeRay appends to the names of what it makes; a label of DNS has 63 characters."""
MOUNTED = "/etc/gangway"
"""Where a pod has the configuration."""
GPU_IMAGE = "deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-570"
"""An image of Google with the driver of NVIDIA."""
SLOW_START_S = 1800.0
"""How long a run waits for machines that are still being ordered when it begins, if the configuration does not say."""


def write(config: JobConfig, request: Request) -> list[str]:
    """Writes the files of a deployment into `request.out`, and returns their names. Raises ConfigError, before anything is
    written, with every reason why this configuration cannot be deployed so; OSError."""
    if problems := list(refusals.problems(config, request)):
        raise ConfigError(f"{config.training.name} cannot be deployed to {request.to}", problems)
    files = rendered(config, request)
    request.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        durable.write_shared(request.out / name, text.encode(), 0o777 if name.endswith(".sh") else 0o666)
    if request.to != "slurm":
        (request.out / "wheels").mkdir(exist_ok=True)
    return list(files)


def rendered(config: JobConfig, request: Request) -> dict[str, str]:
    """Returns the text of each file, by its name."""
    import jinja2

    folder = folder_of(CONFIGS) / "deploy"
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    made.filters["quoted"] = shlex.quote
    found = values(config, request)
    texts = {name: made.get_template(template).render(**found) for name, template in request.target.templates}
    return {"config.yaml": found["config"], **texts}


def values(config: JobConfig, request: Request) -> dict[str, Any]:
    """Returns what the templates name."""
    hosts, python = config.hosts, ".".join(map(str, sys.version_info[:3]))
    cpus, gpus = -int(-hosts.cpus_per_host // 1), hosts_config.devices_per_host(hosts) if hosts.kind == "gpu" else 0
    out = os.path.relpath(request.out)
    extra = {"gpu": "[cuda12]", "tpu": "[tpu]", "cpu": ""}[hosts.kind]
    least, most = _groups(config)
    resource, text = resource_name(config.training.name), deployed_config(config, request)
    env_file = "set -a; . ~/.gangway.env; set +a;" if refusals.secret_variables(config) else ""
    return {
        "name": config.training.name,
        "resource": resource,
        "kind": hosts.kind,
        "config": text,
        "config_map": yaml_source.to_text(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{resource}-config"}, "data": {"config.yaml": text}}
        ),
        "config_folder": MOUNTED,
        "config_path": os.path.abspath(request.out / "config.yaml") if request.to == "slurm" else f"{MOUNTED}/config.yaml",
        "out": out,
        "image": request.image,
        "project": request.project,
        "zone": request.zone,
        "region": refusals.region(request),
        "provider": "aws" if request.is_amazon else "gcp",
        "machine": request.machine,
        "gpu_image": GPU_IMAGE,
        "spot": request.spot,
        "secrets": refusals.secret_variables(config),
        "left_out": refusals.left_out(request),
        "folder": None if documents.is_url(config.training.storage) else config.training.storage,
        "cpus": cpus,
        "gpus": gpus,
        "tpu": _tpu(config),
        "shape": _shape(config),
        "groups": most,
        "min_groups": least,
        "hosts_in_group": hosts_config.hosts_at_a_time(hosts),
        "nodes": [resource] if most == 1 else [f"{resource}-{number}" for number in range(most)],
        "python": python,
        "python_minor": python.rpartition(".")[0],
        "ray_version": metadata.version("ray"),
        "jax": f"jax{extra}=={metadata.version('jax')}",
        "venv": sys.prefix,
        "environment": f"{env_file} cd ~/app && RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONPATH=~/app".strip(),
        "save_s": SAVE_S,
    }


def _groups(config: JobConfig) -> tuple[int, int]:
    """Returns how many groups of machines a run needs, and how many it uses, spares among them: slices of TPUs, or hosts."""
    hosts, size = config.hosts, hosts_config.hosts_at_a_time(config.hosts)
    return hosts_config.min_hosts(hosts) // size, hosts_config.num_hosts(hosts) // size + hosts.spares


def _tpu(config: JobConfig) -> dict[str, Any] | None:
    """Returns the names of a slice; None where hosts have no TPU."""
    hosts = config.hosts
    if hosts.kind != "tpu":
        return None
    names = TPUS[generation(hosts.accelerator or "")]
    pod_type, chips = hosts_config.pod_type(hosts), hosts_config.chips_per_host(hosts)
    return {
        "gke": names.gke,
        "machine": f"{names.machine}-{chips}t",
        "pod_type": pod_type,
        "cloud_type": f"{names.cloud}-{pod_type.rpartition('-')[2]}",
        "runtime": names.runtime,
        "topology": (hosts.topology or "").lower().strip(),
        "chips": chips,
    }


def _shape(config: JobConfig) -> str:
    hosts, (least, most) = config.hosts, _groups(config)
    number = f"{least} to {most}" if least != most else str(most)
    if hosts.kind == "tpu":
        size, chips = hosts_config.hosts_per_slice(hosts), hosts_config.chips_per_host(hosts)
        return f"{number} x a slice {hosts.topology} of {hosts.accelerator}: {size} x {chips} chips"
    devices = f" with {hosts_config.devices_per_host(hosts)} GPUs" if hosts.kind == "gpu" else ""
    return f"{number} x a machine{devices}"


def deployed_config(config: JobConfig, request: Request) -> str:
    """Returns the configuration of the deployment as YAML: what differs from the defaults, its name, no secrets."""
    hosts = config.hosts
    changed: dict[str, Any] = {
        "env": {name: text for name, text in hosts.env.items() if name not in refusals.secret_variables(config)}
    }
    if hosts.kind == "cpu" and hosts_config.num_hosts(hosts) + hosts.spares > 1:
        changed["spread"] = True  # one host on each pod or machine that is asked for
    if request.to == "ray-cluster" and hosts.start_timeout_s == type(hosts).start_timeout_s:
        changed["start_timeout_s"] = SLOW_START_S
    deployed = dataclasses.replace(config, hosts=dataclasses.replace(hosts, **changed))
    data = among(to_dict(deployed), {**given(deployed), "name": None, "storage": None})
    if request.to != "slurm":
        data = refusals.copied_paths(data, os.getcwd())
    return yaml_source.to_text({"name": data.pop("name"), **data})


def resource_name(name: str) -> str:
    """Returns the name of a run as clouds and Kubernetes take it: `llama-3-8b` as it is; `llama_3.8B` is `llama-3-8b-1f0c2a9d`,
    with a number of its own, since `llama-3-8B` is another run."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"run-{slug}".strip("-")
    if slug == name and len(slug) <= LONGEST_NAME:
        return slug
    return f"{slug[: LONGEST_NAME - 9].rstrip('-')}-{zlib.crc32(name.encode()):08x}"


def next_commands(config: JobConfig, request: Request) -> Iterator[str]:
    """Yields the commands that start what was written."""
    resource, out = resource_name(config.training.name), os.path.relpath(request.out)
    if request.to == "slurm":
        yield f"sbatch {shlex.quote(f'{out}/run.sh')}"
        return
    yield f"pip wheel --no-deps --wheel-dir {shlex.quote(f'{out}/wheels')} GANGWAY    # its source, or address"
    if names := refusals.secret_variables(config):
        kept = f"~/.gangway/{resource}.env"
        yield f"write {', '.join(names)} as NAME=VALUE into {kept}, and chmod 600 {kept}"
    if request.image:
        if refusals.secret_variables(config):
            yield f"kubectl create secret generic {resource}-env --from-env-file={kept}"
        yield f"docker build --file {out}/Dockerfile --tag {request.image} . && docker push {request.image}"
        yield f"kubectl apply --filename {out}/rayjob.yaml"
    elif request.to == "tpu-vm":
        yield from (f"bash {out}/tpu_vm.sh {step}" for step in ("create", "setup", "start", "submit"))
    else:
        yield "ray get-auth-token --generate"
        yield f"RAY_AUTH_MODE=token ray up {out}/cluster.yaml"
