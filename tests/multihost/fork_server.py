"""Training processes without the seconds of their imports: forks of a server that has imported JAX and touched no device.

`python -m tests.multihost.fork_server SOCKET` is the server. A fork differs from `python -m trainers.worker` only in that its
imports are done. Whole jobs, in tests/ray and tests/faults, start the real command.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.agent.child_process import ChildProcess
from trainers import worker
from trainers.runtime import distributed

PR_SET_CHILD_SUBREAPER = 36
MAX_MESSAGE_BYTES = 1 << 20
CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"


class ForkServer:
    """The caller's side. `env` must have everything that JAX reads when it is imported, but for the folder of its cache."""

    def __init__(self, env: Mapping[str, str]):
        self._settings = settings_of_jax(env)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-u", "-m", __name__, str(theirs.fileno())]
        alone = {"OPENBLAS_NUM_THREADS": "1"}  # NumPy's would be the one other thread
        self._process = subprocess.Popen(command, env={**env, **alone}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()

    def spawn(self, *, env: Mapping[str, str], first_line: dict[str, Any], log_path: str) -> ChildProcess:
        """As `cluster.agent.child_process.spawn` of `trainers.worker`."""
        assert settings_of_jax(env) == self._settings
        events, events_child = os.pipe()
        stdin_child, stdin = os.pipe()
        with open(log_path, "ab") as log:
            pid = self._fork(env, [stdin_child, log.fileno(), events_child])
        os.close(events_child)
        os.close(stdin_child)
        no_guard = os.open(os.devnull, os.O_RDONLY)
        child = ChildProcess(Forked(pid, stdin), os.fdopen(events, "rb"), no_guard, log_path)  # type: ignore[arg-type]
        child.send(first_line)
        return child

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _fork(self, env: Mapping[str, str], fds: list[int]) -> int:
        """The id of a process that is a child of this one: a fork of the server's fork, whose parent ends at once."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._socket, [json.dumps(dict(env)).encode()], fds)
            answer = self._socket.recv(100)
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert answer, f"the fork server has ended with status {self._process.wait()}"
        return int(answer)


class Forked:
    """What ChildProcess needs of a `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: int):
        self.pid, self.stdin = pid, os.fdopen(stdin, "wb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def settings_of_jax(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("JAX_") and name != CACHE_DIR}


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# ---------------------------------------------------------------------- the server's side


def main(requests: socket.socket) -> None:
    import pytest  # noqa: F401 - the tests' own tasks and trainers import it

    import trainers.base
    import trainers.data.sources.text
    import trainers.tasks.causal_lm  # noqa: F401

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork may copy a lock that another thread holds; there are {len(threads)}"
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, 3)
        if not message:
            return
        if pid := fork_orphan():
            requests.send(str(pid).encode())
            for fd in fds:
                os.close(fd)
        else:
            requests.close()
            become_worker(json.loads(message), *fds)


def fork_orphan() -> int:
    """The new process's id; 0 in the new process, which the server's parent has inherited when this returns in the server."""
    ids, ids_child = os.pipe()
    if between := os.fork():
        os.close(ids_child)
        os.waitpid(between, 0)
        with os.fdopen(ids) as file:
            return int(file.read())
    if pid := os.fork():
        os.write(ids_child, str(pid).encode())
        os._exit(0)
    os.close(ids)
    os.close(ids_child)
    return 0


def become_worker(env: dict[str, str], stdin: int, log: int, events: int) -> None:
    os.setsid()
    for fd, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(fd, number)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update(env, EVENT_FD=str(events))
    distributed.use_compile_cache(env[CACHE_DIR])
    np.random.seed()
    worker.main()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
