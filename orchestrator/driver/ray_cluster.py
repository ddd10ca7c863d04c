"""The Ray cluster of a run: an existing one, or a private one that the command starts on this machine.

A private Ray listens on the loopback address and answers only processes that have its token. Each private Ray has a new token. It
is in the environment of Ray's processes, which only their user can read; no file holds it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import signal
import stat
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from cluster.agent.child_process import RAY_TOKEN
from orchestrator.config.job import JobConfig
from orchestrator.driver import head
from orchestrator.driver.ray_train import SETTINGS

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AUTH_MODE, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
AGENT_TIMEOUT = "RAY_agent_register_timeout_ms"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Lets Ray use the loopback address. Despite its name the variable applies on Linux too. Without it Ray replaces 127.0.0.1 by
another address of the machine wherever it is given."""
RUN_OF_JOB = "job_name"
"""The key of the metadata that Ray's page of jobs shows as the name."""
ASKED_BY_NOBODY = ("start_api_server", "start_monitor", "start_log_monitor")
"""Processes that Ray starts beside the cluster of one machine, and waits for: the server of the dashboard, which runs without a
dashboard too, the autoscaler, and what copies logs to the driver. They take seconds of each start, and memory of each run."""
PORTS_OF_AGENTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
"""The ports on which the two agents of a node listen, by Ray's own names."""
CONFIG_OF_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable in which a submitted job has what Ray knows of it."""
JOB_STOP_LIMIT_S = 30.0
SAME_FOR_ALL_RAYS = 52365
"""Ray's default for the last of them: of two Rays on a machine, the agent of the second could not listen."""
START_LIMIT_S = 180.0
"""So long may a node need to register with Ray, and its agents to answer it. Ray's own limits are 30 s."""
SHOWN_AS_INCIDENTS = "Raylet is terminated|has been marked dead|worker died or was killed"
"""Ray's own messages about lost nodes and workers, each with a long stack. The console shows an incident instead."""


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Lets the signals that end a command come when Ray has started, to whom they would have come before. Half of a Ray cannot be
    ended: its processes would stay, or this one would crash. And its core takes SIGTERM, prints where it is, and aborts. In the
    main thread, while there is no other one that could get them."""
    handler, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@signals_later()
def connect(config: JobConfig) -> bool:
    """Connects to the cluster named by the environment or the configuration, or starts Ray on this machine.

    Returns whether Ray Train shall run and supervise the driver as a separate process. Raises ClusterError if the cluster
    refuses.
    """
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", SHOWN_AS_INCIDENTS)
    named = head.named(os.environ, config.driver.address)
    if named is None:
        protect(os.environ)  # before Ray is imported: Ray reads these variables at import
        without_hooks(os.environ)
    import ray

    for name in ("ray", "ray.train"):
        # Ray's log lines would break the live line of the console, which shows what matters of them.
        logging.getLogger(name).setLevel(logging.WARNING)
    if named is not None:
        address, source = named
        try:
            ray.init(address, job_config=named_after(config), log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            raise head.ClusterError(f"the Ray cluster at {address} (from {source}): {str(error).splitlines()[0]}") from error
        return True
    from cluster.hosts.config import num_hosts

    hosts = num_hosts(config.hosts) + config.hosts.spares
    # One CPU more: where Ray Train supervises the driver, the driver is a worker that takes one.
    cpus = int(hosts * config.hosts.cpus_per_host) + 1
    folder = os.path.join(private_folder(), "ray")
    # "local": otherwise Ray would join a cluster that somebody else has started on this machine.
    helpers = () if config.driver.dashboard else ASKED_BY_NOBODY
    with without_helpers(helpers), in_a_session(), patient_with_agents(START_LIMIT_S):
        try:
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=config.driver.dashboard,
                job_config=named_after(config),
                log_to_driver=False,
                logging_level=logging.WARNING,
                _temp_dir=folder,
            )
        except Exception as error:  # Ray raises all kinds: `Exception` itself if its node does not register
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise head.ClusterError(
                f"Ray did not start on this machine: {why} Is it busy, or out of memory? Its logs are in "
                f"{folder}/session_latest/logs. Call the command again, or give the address of a Ray that runs (RAY_ADDRESS)"
            ) from error
    return config.driver.supervise


def named_after(config: JobConfig) -> Any:
    """Returns what Ray's dashboard shows as the metadata of the job: the name of the run. Ray takes it at the start only."""
    from ray.job_config import JobConfig as RayJobConfig

    return RayJobConfig(metadata={RUN_OF_JOB: config.training.name})


@contextlib.contextmanager
def _replaced(owner: Any, **new: Any) -> Iterator[None]:
    """Replaces what Ray has no setting for. A name that is private may go with a new version: it is not missed then."""
    before = {name: getattr(owner, name) for name in new if hasattr(owner, name)}
    try:
        for name in before:
            setattr(owner, name, new[name])
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def without_helpers(names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Lets `ray.init` leave out these processes, which are named by the methods of Ray's own class that start them."""
    from cluster.ray_internals import Node

    return _replaced(Node, **dict.fromkeys(names, lambda *_, **__: None))


def in_a_session() -> contextlib.AbstractContextManager[None]:
    """Lets the processes that `ray.init` starts be in a session of their own. A signal to the process group of the command, as
    from `timeout`, a batch system or a terminal, is for the command: it still needs Ray to save the state."""
    from cluster.ray_internals import services

    start: Any = services.ConsolePopen  # of `Popen`, the one that Ray uses for its own processes

    def in_session(*command: Any, preexec_fn: Callable[[], None] | None = None, **named: Any) -> Any:
        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # blocked by `signals_later`
            if preexec_fn is not None:
                preexec_fn()

        return start(*command, preexec_fn=prepare, start_new_session=True, **named)

    return _replaced(services, ConsolePopen=in_session)


@contextlib.contextmanager
def patient_with_agents(limit_s: float) -> Iterator[None]:
    """Lets this process start Ray nodes on a machine so busy that Ray's agents need long.

    A raylet waits until both agents have written the ports that they found. It aborts after 15 s, which no setting changes, and
    all that `ray.init` tells of it is its own limit of 30 s. Here the ports are found before: nothing waits for the agents, and
    a start takes a third less time, too. See https://github.com/ray-project/ray/issues/65983.
    """
    from cluster.agent.machine import held_port
    from cluster.ray_internals import DASHBOARD_AGENT_LISTEN_PORT_NAME, Node, persist_port, services

    start_raylet, get_node = Node.start_raylet, services.get_node
    raylets: dict[str, Any] = {}

    def with_ports(node: Any, *arguments: Any, **named: Any) -> None:
        held = contextlib.ExitStack()
        weakref.finalize(node, held.close)  # not before: its agents may come late
        for name in PORTS_OF_AGENTS:
            if getattr(node._ray_params, name) in (None, 0, SAME_FOR_ALL_RAYS):
                setattr(node._ray_params, name, held.enter_context(held_port()).getsockname()[1])
        # The one port that a raylet is not told: it waits for the file in which the agent writes it.
        persist_port(
            node.get_session_dir_path(), node.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, node.dashboard_agent_listen_port
        )
        start_raylet(node, *arguments, **named)
        raylets[node.node_id] = node.all_processes["raylet"][0].process

    def get_node_at_last(address: str, node_id: str) -> Any:
        end_s = time.monotonic() + limit_s
        while True:
            try:
                return get_node(address, node_id)
            except RuntimeError:
                if node_id in raylets and (status := raylets[node_id].poll()) is not None:
                    raise OSError(f"its raylet ended with status {status}; raylet.err says why.") from None
                if time.monotonic() > end_s or {*ENDING} & signal.sigpending():
                    raise

    os.environ.setdefault(AGENT_TIMEOUT, str(int(limit_s * 1000)))
    with _replaced(Node, start_raylet=with_ports), _replaced(services, get_node=get_node_at_last):
        yield


def head_address() -> str:
    """Returns the address of the head of the cluster that this process is connected to."""
    import ray

    return ray.get_runtime_context().gcs_address


def disconnect() -> None:
    """Ends the connection, and the Ray that this process has started, if there is one."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def stop_own_job(environ: Mapping[str, str]) -> None:
    """Stops the job of Ray that this process is in, if it is in one. Its status is STOPPED then. By an exit status that is not 0
    it would be FAILED, and who has submitted it might begin it again, as KubeRay does. Called when all is saved."""
    job = json.loads(environ.get(CONFIG_OF_JOB, "{}")).get("metadata", {}).get("job_submission_id")
    if job is None:
        return
    from ray.job_submission import JobSubmissionClient

    is_stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_stopped.set())
    why = f"its signal has not come within {JOB_STOP_LIMIT_S:.0f} s"
    try:
        JobSubmissionClient().stop_job(job)
    except (OSError, RuntimeError, ValueError) as error:  # what Ray's client raises
        why = str(error)
    else:
        # An exit before that would count.
        is_stopped.wait(JOB_STOP_LIMIT_S)
    if not is_stopped.is_set():
        text = f"warning: Ray has not stopped its job {job}: {why}; the run is saved, but Ray takes the job for failed"
        print(text, file=sys.stderr, flush=True)


def join(address: str) -> None:
    """Connects to the Ray cluster of a running run. Raises what `ray.init` raises, and ConnectionError if it refuses the token.

    The token of a private Ray is read from the environment of its processes, which the same user may do.
    """
    if is_loopback(address):  # before Ray is imported: Ray reads these variables at import
        os.environ.update(LOOPBACK | authentication_of(address))
    import ray

    if ray.is_initialized():
        return
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except ray.exceptions.AuthenticationError as error:
        raise ConnectionError(str(error).splitlines()[0]) from error


def protect(environ: MutableMapping[str, str]) -> None:
    """Sets the variables in `environ` that close a new Ray to other users. Variables that the user has set are kept."""
    environ.setdefault(AUTH_MODE, "token")
    if environ[AUTH_MODE] == "token" and not (environ.get(RAY_TOKEN) or environ.get(TOKEN_PATH)):
        # Without this Ray would write a token to a file in the home folder, which all other Rays of this user would then use.
        environ[RAY_TOKEN] = secrets.token_hex(32)
    for name, value in LOOPBACK.items():
        environ.setdefault(name, value)


def without_hooks(environ: MutableMapping[str, str]) -> None:
    """Keeps a Ray on this machine alone from making another environment for its workers: they have that of the command. Under
    `uv run`, Ray would start each by `uv run` again, in a copy of the working folder."""
    environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    environ.pop("RAY_RUNTIME_ENV_HOOK", None)


def private_folder(parent: str = "/tmp") -> str:
    """Returns a folder that only this user can enter, for Ray's files and sockets. Its path is short: socket paths have a limit.

    Ray makes the folders inside it writable for everybody, and they hold code that workers run.
    """
    path = os.path.join(parent, f"gangway-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    # Checked with `lstat`: somebody else may have made a folder or a link of this name.
    status = os.lstat(path)
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return path if is_private else tempfile.mkdtemp(prefix="gangway-", dir=parent)


def authentication_of(address: str) -> dict[str, str]:
    """Returns the authentication variables of this user's Ray on this machine; none if no such process listens on the port."""
    port = int(address.rpartition(":")[2])
    for process in psutil.process_iter():
        # A process of another user, or one that has just ended, cannot be read: it is not ours.
        with suppress(psutil.Error):
            if process.name() == "gcs_server" and port in _listening_ports(process):
                environ = process.environ()
                return {name: environ[name] for name in (AUTH_MODE, RAY_TOKEN, TOKEN_PATH) if name in environ}
    return {}


def is_loopback(address: str) -> bool:
    """Returns whether `host:port` is a loopback address. A host name counts as another machine."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def _listening_ports(process: psutil.Process) -> set[int]:
    return {socket.laddr.port for socket in process.net_connections("tcp") if socket.status == psutil.CONN_LISTEN}
