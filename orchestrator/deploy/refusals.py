"""Why a configuration cannot be deployed as it was asked: every reason, with the key or option, the value, and the way out. Which
files of this machine it names, and what of it must be in no file. Pure, but for the question whether a file is there."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.hosts.environment import OVERWRITTEN, is_among
from cluster.hosts.tpu import topology_problem
from gangway.config import yaml_source
from gangway.config.section import did_you_mean
from gangway.storage import documents
from orchestrator.config.job import JobConfig, shown, to_dict
from orchestrator.deploy.request import GPUS_OF_MACHINES, TARGETS, Request
from trainers.config.arguments import absent_paths

OF_ONE_MACHINE = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/local", "/localscratch")
"""Folders that each machine has for itself."""
OF_HOSTS = ("storage", "cache_dir", "hosts", "previews")
"""Keys and sections that name no file of this machine: they have paths of the hosts, or texts."""
LEFT_OUT = (".git", ".venv", "__pycache__", "/runs", "/mlruns", "*.env", "auth_token", "*.pem", "*-key.json")
"""What of the working folder is not copied: results, environments, and whatever may hold a secret. `/`: at the top alone."""
OF_SETTINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".sh", ".py", ".ipynb")
MOST_SETTINGS_BYTES = 1_000_000
SHORTEST_SECRET = 8
"""Files of these endings and up to this size are searched for the secrets that have so many bytes."""
MOST_LINKS = 3
"""Shown of a folder."""
OPTIONS = ("image", "project", "zone", "machine", "spot")
EXAMPLES = {
    "image": "europe-docker.pkg.dev/my-project/images/llama:1",
    "project": "my-project",
    "zone": "us-east5-b",
    "machine": "a3-highgpu-8g or p5.48xlarge",
}
IMAGE = re.compile(r"[a-z0-9][a-z0-9._/-]*(?::\d+/[a-z0-9._/-]+)?(?::[\w.-]+|@sha256:[0-9a-f]{64})", re.ASCII)
PROJECT = re.compile(r"(?:[a-z][a-z0-9.-]*:)?[a-z][a-z0-9-]*")
MACHINE = re.compile(r"[a-z][a-z0-9]*[.-][a-z0-9.-]+")
IN_SCRIPTS = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._/-]*")
"""A path that means the same in every file that is written: a script, a Dockerfile, a pattern, a comment."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What a shell can export."""
OF_SHELLS = dict.fromkeys(
    (
        *("BASH*", "COMP_*", "DIRSTACK", "EPOCH*", "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "HOSTNAME", "HOSTTYPE"),
        *("IFS", "LINENO", "MACHTYPE", "OPT???", "OSTYPE", "PATH", "PPID", "PS4", "PWD", "RANDOM", "SECONDS", "SHELL*"),
        *("SHLVL", "SRANDOM", "TERM", "UID", "_", "VENV", "CONFIG", "HEAD_IP", "SLURM_*", "SRUN_*", "RAY_ADDRESS"),
        *("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "machines", "head", "workers", "address", "port", "dashboard"),
        *("probe", "shared", "start", "steps", "tries", "run", "asked", "status", "variable"),
        *("folder", "on_machine", "ended", "ray"),
    ),
    "",
)
"""What a shell, or the script for SLURM, sets for itself: a secret of this name would not arrive."""
ZONES = {"google": re.compile(r"([a-z]+-[a-z]+\d+)-[a-z]"), "amazon": re.compile(r"([a-z]{2}-[a-z-]+-\d)[a-z]")}


def problems(config: JobConfig, request: Request) -> Iterator[str]:
    """Yields a line for each reason."""
    yield from _kind(config, request)
    yield from _storage(config, request)
    if config.driver.address:
        yield f"driver.address = {config.driver.address!r}: leave it out: the deployment says where its Ray is"
    yield from absent(config, request)[0]
    yield from secret_problems(config)
    yield from _options(request)
    yield from _machine(config, request)
    if not IN_SCRIPTS.fullmatch(os.path.relpath(request.out)):
        yield f"--out {str(request.out)!r}: expected letters, digits, '.', '_', '-' and '/', since it stands in commands"
    if request.to == "slurm":
        if _is_of_one_machine(sys.prefix):
            yield (
                f"the environment of this command, {sys.prefix}: each machine has its own, and the hosts would run in it; "
                "install gangway in a folder that all machines share, and deploy from there"
            )
        return
    yield from path_problems(to_dict(config), os.getcwd())
    yield from _copied_secrets(config, request)
    if not _is_inside(request.out):
        yield f"--out {request.out}: expected a folder inside the working folder, from which your code is taken"


def absent(config: JobConfig, request: Request) -> tuple[list[str], dict[str, str]]:
    """Returns what `absent_paths` does: machines of SLURM share folders, the others get the working folder."""
    return absent_paths(config.training, None if request.to == "slurm" else os.getcwd())


def _kind(config: JobConfig, request: Request) -> Iterator[str]:
    hosts = config.hosts
    if hosts.kind not in request.target.kinds:
        others = [name for name, target in TARGETS.items() if hosts.kind in target.kinds]
        expected = " or ".join(request.target.kinds)
        yield f"hosts.kind = {hosts.kind}: --to {request.to} is for {expected}; for {hosts.kind} hosts: --to {', '.join(others)}"
    if hosts.kind == "tpu" and (problem := topology_problem(hosts.accelerator or "", hosts.topology or "")):
        yield f"hosts.topology = {hosts.topology}: {problem}"


def _storage(config: JobConfig, request: Request) -> Iterator[str]:
    storage = config.training.storage
    if documents.is_url(storage):
        return
    if request.to != "slurm":
        yield (
            f"storage = {storage}: a folder of this machine, which the hosts of {request.to} do not share; "
            "set storage to a bucket: gs://... or s3://..."
        )
    elif _is_of_one_machine(storage):
        yield f"storage = {storage}: each machine has its own; set storage to a folder that all machines share, or to a bucket"


def _is_of_one_machine(path: str) -> bool:
    return any(_is_below(path, folder) for folder in OF_ONE_MACHINE)


def _options(request: Request) -> Iterator[str]:
    for name in OPTIONS:
        value, target = getattr(request, name), request.target
        if value and name not in (*target.needs, *target.takes):
            yield f"--{name}: --to {request.to} has no use for it; leave it out"
        if not value and name in target.needs:
            yield f"--to {request.to} needs --{name}, such as {EXAMPLES[name]}"
    if request.image and not IMAGE.fullmatch(request.image):
        yield f"--image {request.image!r}: expected a name with a tag, in lower case, such as {EXAMPLES['image']}"
    if request.image and request.image.endswith(":latest"):
        yield f"--image {request.image}: a tag that moves: hosts of one gang may get different images; give it a version"
    if request.project and not PROJECT.fullmatch(request.project):
        yield f"--project {request.project!r}: expected the ID of a project, such as {EXAMPLES['project']}"
    if request.zone and region(request) is None:
        example = "us-east-1a" if request.is_amazon else "us-east5-b"
        yield f"--zone {request.zone!r}: expected a zone of {'Amazon' if request.is_amazon else 'Google'}, such as {example}"


def _machine(config: JobConfig, request: Request) -> Iterator[str]:
    hosts, machine = config.hosts, request.machine
    if request.to != "ray-cluster":
        return
    if not request.is_amazon and not request.project:
        yield f"--to ray-cluster on Google needs --project, such as {EXAMPLES['project']}"
    if request.is_amazon and request.project:
        yield f"--project {request.project}: machines of Amazon have none; leave it out"
    if hosts.kind == "tpu":
        if machine:
            yield f"--machine {machine}: hosts.accelerator and hosts.topology say which TPU machines; leave it out"
    elif not machine:
        yield f"--to ray-cluster with {hosts.kind} hosts needs --machine, such as {EXAMPLES['machine']}"
    elif not MACHINE.fullmatch(machine):
        yield f"--machine {machine!r}: expected a type of machine, such as {EXAMPLES['machine']}"
    elif hosts.kind == "gpu":
        count = GPUS_OF_MACHINES.get(machine)
        if count is None:
            yield f"--machine {machine}: not known to have GPUs{did_you_mean(machine, GPUS_OF_MACHINES, at_most=3)}"
        elif count != (asked := hosts.devices_per_host or 1):
            yield f"hosts.devices_per_host = {asked}: --machine {machine} has {count} GPUs; set it to {count}"


def region(request: Request) -> str | None:
    """Returns the region of the zone; None if that is not one of the request's cloud."""
    match = ZONES["amazon" if request.is_amazon else "google"].fullmatch(request.zone or "")
    return match and match[1]


def _is_inside(folder: Path) -> bool:
    return folder.resolve().is_relative_to(Path.cwd().resolve())


def left_out(request: Request) -> list[str]:
    """Returns the patterns of what is not copied of the working folder; one with `/` in front holds at its top alone."""
    return [*LEFT_OUT, *(f"/{name}" for name in _with_secrets(request))]


def _with_secrets(request: Request) -> list[str]:
    """Returns the configuration's file, if it would be copied and has secrets; what the machines use is written without them."""
    env = (yaml_source.read(request.config).data.get("hosts") or {}).get("env") or {}
    holds = any(not is_among(name, PUBLIC) for name in env)
    return [os.path.relpath(request.config.resolve())] if holds and _is_inside(request.config) else []


def _copied_secrets(config: JobConfig, request: Request) -> Iterator[str]:
    """Yields a line for each other file of the working folder that would be copied with a secret in it."""
    for name in (own := _with_secrets(request)):
        if not IN_SCRIPTS.fullmatch(name):
            yield f"{name!r} holds secrets, and its name cannot be written among what is not copied; rename it"
    values = {name: config.hosts.env[name].encode() for name in secret_variables(config)}
    values = {name: value for name, value in values.items() if len(value) >= SHORTEST_SECRET}
    for folder, folders, files in os.walk(".") if values else ():
        folders[:] = [name for name in folders if not _is_left_out(os.path.join(folder, name))]
        for path in (os.path.join(folder, name) for name in files if name.endswith(OF_SETTINGS)):
            if os.path.relpath(path) in own or _is_left_out(path) or not os.path.isfile(path):
                continue
            if os.path.getsize(path) > MOST_SETTINGS_BYTES:
                continue
            text = Path(path).read_bytes()
            for name in (name for name, value in values.items() if value in text):
                yield f"{path}: it has the value of hosts.env.{name}, and would be copied; take it out, or move the file"


def _is_left_out(path: str) -> bool:
    """Whether a path below the working folder, such as `./texts/a.env`, is not copied."""
    name, at_top = os.path.basename(path), os.path.dirname(path) == "."
    return any(fnmatch.fnmatchcase(name, each.lstrip("/")) for each in LEFT_OUT if at_top or not each.startswith("/"))


def copied_paths(data: Mapping[str, Any], here: str) -> dict[str, Any]:
    """Returns the data of a configuration with the paths inside the working folder `here` relative to it."""
    return {name: value if name in OF_HOSTS else _relative(value, here) for name, value in data.items()}


def path_problems(data: Mapping[str, Any], here: str) -> Iterator[str]:
    """Yields a line for each path that is on this machine and not in its working folder."""
    for name, value in data.items():
        if name not in OF_HOSTS:
            yield from _outside(value, here, name)


def _relative(value: Any, here: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _relative(item, here) for name, item in value.items()}
    if isinstance(value, list):
        return [_relative(item, here) for item in value]
    if not isinstance(value, str) or not os.path.isabs(path := os.path.expanduser(value)):
        return value
    path = path if _is_below(os.path.normpath(path), here) else os.path.realpath(path)
    return os.path.relpath(path, here) if _is_below(path, here) else value


def _outside(value: Any, here: str, key: str) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _outside(item, here, f"{key}.{name}")
    elif isinstance(value, str) and os.path.exists(path := os.path.expanduser(value)):
        for name in itertools.islice(_leaving(path, os.path.realpath(here)), MOST_LINKS):
            link = "" if name == path else f": {name} is a link"
            yield (
                f"{key} = {value}{link or ': a file or folder of this machine'} outside the working folder, which the hosts will "
                "not have; copy it into the working folder, or to a bucket"
            )


def _leaving(path: str, here: str) -> Iterator[str]:
    """Yields the path, or what lies below it, if that is outside of `here` when all links are followed."""
    if not _is_below(os.path.realpath(path), here):
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not _is_left_out(os.path.join(folder, name))]
        for name in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(name) and not _is_below(os.path.realpath(name), here):
                yield name


def _is_below(path: str, here: str) -> bool:
    return f"{path}/".startswith(f"{here.rstrip('/')}/")


PUBLIC = dict.fromkeys(
    ("XLA_*", "LIBTPU_*", "NCCL_*", "JAX_*", "TPU_*", "TF_CPP_*", "CUDA_*", "OMP_*", "GANGWAY_*", "GRPC_*", *OVERWRITTEN), ""
)
"""Variables of `hosts.env` that are settings of libraries. They stay in the configuration: all others are taken for secrets."""


def secret_variables(config: JobConfig) -> tuple[str, ...]:
    """Returns the names of the variables of `hosts.env` that only their machines may know."""
    return tuple(name for name in config.hosts.env if not is_among(name, PUBLIC))


def secret_problems(config: JobConfig) -> Iterator[str]:
    """Yields a line for each secret that a deployment has no place for."""
    for name in secret_variables(config):
        if not VARIABLE.fullmatch(name):
            yield f"hosts.env: the variable {name!r}: expected letters, digits and '_', since the machines get it by a shell"
        elif is_among(name, OF_SHELLS):
            yield f"hosts.env.{name}: a shell of the deployment sets it for itself; use another name"
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
