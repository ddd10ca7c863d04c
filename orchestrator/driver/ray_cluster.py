"""The Ray that a run uses: a cluster that is there, or one of its own on this machine.

A Ray of its own listens on the loopback address, and answers only processes that have its token. Each such Ray has a token of
its own. The token is in the environment of Ray's processes, which only their user can read; no file holds it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress

import psutil

from cluster.agent.child_process import RAY_TOKEN
from orchestrator.config.job import JobConfig
from orchestrator.driver.ray_train import SETTINGS

AUTH_MODE, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Has Ray take the loopback address for that of this machine. Despite its name it holds on Linux, too. Without it Ray makes
another address of 127.0.0.1, wherever it is given one."""
TOLD_BY_INCIDENTS = "Raylet is terminated|has been marked dead|worker died or was killed"
"""Ray's own messages about what it has lost, with a page of its own stack: an incident says what became of it."""


def connect(config: JobConfig) -> bool:
    """Connects to the cluster named by the environment or the configuration, or starts Ray on this machine.

    Returns whether Ray Train shall supervise the driver as a process of its own.
    """
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", TOLD_BY_INCIDENTS)
    address = os.environ.get("RAY_ADDRESS") or config.driver.address
    if not address:
        protect(os.environ)  # before Ray is imported: it reads them then
    import ray

    for name in ("ray", "ray.train"):
        # Its lines would tear the console's: what matters of them is told there.
        logging.getLogger(name).setLevel(logging.WARNING)
    if address:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
        return True
    from cluster.hosts.config import num_hosts

    hosts = num_hosts(config.hosts) + config.hosts.spares
    cpus = int(hosts * config.hosts.cpus_per_host) + 1
    # "local": it would else join whatever Ray somebody has started on this machine.
    ray.init(
        "local",
        num_cpus=cpus,
        include_dashboard=config.driver.dashboard,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _temp_dir=os.path.join(private_folder(), "ray"),
    )
    return config.driver.supervise


def disconnect() -> None:
    import ray

    ray.shutdown()


def join(address: str) -> None:
    """Connects to the Ray of a run that goes on. Raises what `ray.init` raises, and ConnectionError if it refuses the token.

    The token of a Ray on this machine's loopback address is read from the environment of its processes: the same user may.
    """
    if is_loopback(address):  # before Ray is imported: it reads them then
        os.environ.update(LOOPBACK | authentication_of(address))
    import ray

    if ray.is_initialized():
        return
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except ray.exceptions.AuthenticationError as error:
        raise ConnectionError(str(error).splitlines()[0]) from error


def protect(environ: MutableMapping[str, str]) -> None:
    """Sets in `environ` what makes a Ray that is started with it closed to others. What the user has set there holds."""
    environ.setdefault(AUTH_MODE, "token")
    if environ[AUTH_MODE] == "token" and not (environ.get(RAY_TOKEN) or environ.get(TOKEN_PATH)):
        # Without it Ray writes a token into a file in the home folder, which then binds every other Ray of this user.
        environ[RAY_TOKEN] = secrets.token_hex(32)
    for name, value in LOOPBACK.items():
        environ.setdefault(name, value)


def private_folder(parent: str = "/tmp") -> str:
    """A folder of this user's alone; short, since the paths of sockets have a limit.

    For the files and sockets of Ray: it lets everybody write into the folders that it makes for them, worker code among it.
    """
    path = os.path.join(parent, f"gangway-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    about = os.lstat(path)
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
    return path if is_own else tempfile.mkdtemp(prefix="gangway-", dir=parent)


def authentication_of(address: str) -> dict[str, str]:
    """The variables that a Ray of this user on this machine authenticates by; none if no such process listens on the port."""
    port = int(address.rpartition(":")[2])
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "gcs_server" and port in _listening_ports(process):
                found = process.environ()
                return {name: found[name] for name in (AUTH_MODE, RAY_TOKEN, TOKEN_PATH) if name in found}
    return {}


def is_loopback(address: str) -> bool:
    """Whether `host:port` is on this machine alone. A host name is taken for another machine."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def _listening_ports(process: psutil.Process) -> set[int]:
    return {socket.laddr.port for socket in process.net_connections("tcp") if socket.status == psutil.CONN_LISTEN}
