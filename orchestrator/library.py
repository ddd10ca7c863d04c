"""Training as a library, on hosts: `docs/library.md` shows it.

    result = launch(Training(Net, loss, data, steps=1000, run_dir="runs/net"), hosts=2)

The run is that of `python -m orchestrator.run`, in a process of its own (`orchestrator/commands/launched.py`): so the user's
program keeps its environment, its signals and its own use of Ray. Pieces go by the names by which the processes of the run import
them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from cluster.agent.child_process import import_path
from gangway.config.importable import LAUNCHING, why_not_here
from gangway.config.section import did_you_mean
from gangway.errors import UsageError
from gangway.storage import documents
from gangway.terminal import shown
from orchestrator.config.job import ConfigError, JobConfig, build
from trainers.config.arguments import ORCHESTRATOR_SECTIONS
from trainers.config.keywords import plain, put

END = "end.json"
"""The file in which the process of the run says how it has ended."""
KEPT_LINES = 20
"""Of what the process of the run prints: shown if it ends without a word."""
END_TIMEOUT_S = 30.0
"""How long the process of a run may take to end when nobody waits for the run any longer."""
OUTPUT_TIMEOUT_S = 5.0


class LaunchError(Exception):
    """The run has failed. The message has the line of the user's code, if the error arose there."""


class LaunchableTraining(Protocol):
    """`trainers.library.Training`, which needs JAX."""

    run_dir: str | None
    progress: bool

    def configuration(self, run_dir: str) -> dict[str, Any]: ...

    def write_data(self, run_dir: str, *, private: bool = True) -> None: ...

    def result(self, run_dir: str, stop_reason: str) -> Any: ...


def launch(training: LaunchableTraining, *, hosts: int | Mapping[str, Any] = 1, **settings: Any) -> Any:
    """Trains on `hosts` hosts, and recovers from failures. Returns the `trainers.library.Result`.

    `hosts` is a number of CPU hosts, or the section `hosts` of a configuration. `settings`: the sections `driver` and
    `tracking`, or keys of theirs, such as `**{"tracking.mlflow": False}`. With `RAY_ADDRESS`, or `driver={"address": ...}`, the
    run uses that cluster; otherwise it starts Ray on this machine.

    Ctrl-C saves the state and ends the run; a second one ends it at once, and raises KeyboardInterrupt. Any thread may call
    this. Raises UsageError with everything that is wrong with the settings and the pieces, and LaunchError if the run fails.
    """
    if why_not := why_not_here("launch", os.environ):
        raise UsageError(why_not)
    config, data = configuration(training, hosts, settings)
    training.write_data(config.run_dir, private=config.hosts.private_files)
    end = run_elsewhere(data, show=training.progress)
    if end["status"] == "refused":
        raise UsageError(end["error"])
    if end["status"] == "failed":
        raise LaunchError(end["error"])
    # A run that is stopped while it starts has no reason of a trainer.
    return training.result(config.run_dir, end["stop_reason"] or "interrupted")


def configuration(
    training: LaunchableTraining, hosts: int | Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[JobConfig, dict[str, Any]]:
    """Returns the checked configuration of the run, and the data that it was built from. Raises UsageError."""
    problems = [text for name in settings for text in _unknown(name)]
    if training.run_dir is None:
        problems.append("run_dir: a launch keeps its checkpoints there: give one, such as Training(..., run_dir='runs/first')")
    try:
        data = training.configuration(training.run_dir or os.path.abspath("nowhere"))
    except UsageError as error:
        problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    data["hosts"] = plain(hosts) if isinstance(hosts, Mapping) else {"count": hosts}
    for name, value in settings.items():
        put(data, name.split("."), plain(value))
    try:
        config = build(data, name="launch")
    except ConfigError as error:
        raise UsageError(str(error)) from None
    # After the check, which wants `hosts` as the user gave it. On every host: those of a cluster do not get our environment.
    put(data, ["hosts", "env"], {LAUNCHING: "1"})
    return config, data


def _unknown(name: str) -> Iterator[str]:
    top = name.partition(".")[0]
    if top not in ORCHESTRATOR_SECTIONS:
        hint = did_you_mean(top, ORCHESTRATOR_SECTIONS)
        yield f"{name}: launch takes {', '.join(ORCHESTRATOR_SECTIONS)} and their keys, and Training(...) takes all others{hint}"


# ---------------------------------------------------------------------- the process of the run


def run_elsewhere(data: Mapping[str, Any], *, show: bool) -> dict[str, Any]:
    """Runs a job in a process of its own, and shows what it tells. Returns its end: `status`, `error`, `stop_reason`."""
    with tempfile.TemporaryDirectory(prefix="gangway-") as folder:
        end = Path(folder, END)
        child = _start(is_shown_live=show and _is_terminal())
        output = Output(child, show=show)
        try:
            _send(child, {"configuration": data, "end": str(end), "program": sys.argv[0]})
            with passed_on(child):
                status = child.wait()
        finally:
            _leave(child)
            output.close()
        found = documents.read_json(end)
        return found if found is not None else _without_a_word(status, output.lines)


def _start(*, is_shown_live: bool) -> subprocess.Popen:
    # A terminal has a view that changes. Elsewhere, as in a notebook, only Python can write.
    output = None if is_shown_live else subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.commands.launched"],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=None if is_shown_live else subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(),
        start_new_session=True,  # `passed_on` passes the Ctrl-C of a terminal on, once
    )


def environment() -> dict[str, str]:
    """Returns the environment of the process of the run: it finds the same modules as this one."""
    paths = import_path([path or os.getcwd() for path in sys.path])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), LAUNCHING: "1"}


def _is_terminal() -> bool:
    # Not if there is another object in the place of `sys.stdout`: a program may keep what is printed.
    return sys.__stdout__ is not None and sys.stdout is sys.__stdout__ and sys.__stdout__.isatty()


def _send(child: subprocess.Popen, message: Mapping[str, Any]) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already: its exit status says so
        child.stdin.write(json.dumps(message) + "\n")
        child.stdin.flush()


def _leave(child: subprocess.Popen) -> None:
    """Waits for the end of the process of the run. If it still runs, the end of its input asks it to save and stop."""
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.close()
    try:
        child.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _without_a_word(status: int, lines: deque[str]) -> dict[str, Any]:
    if status in (-signal.SIGINT, 128 + signal.SIGINT):
        raise KeyboardInterrupt  # before anything was taken
    detail = "\n".join(lines) or "its output is above"
    return {"status": "failed", "error": f"the process of the run ended without an outcome (exit status {status}):\n{detail}"}


class Output:
    """Shows what a process prints, in a thread, and keeps the last lines."""

    def __init__(self, child: subprocess.Popen, *, show: bool):
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._child, self._show = child, show
        self._thread = threading.Thread(target=self._read, name="output of the run", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # A process that the child left behind may hold the pipe open.
        self._thread.join(OUTPUT_TIMEOUT_S)

    def _read(self) -> None:
        for line in self._child.stdout or ():
            self.lines.append(line.rstrip())
            if self._show:
                # A line that cannot be shown must not keep this thread from reading: the run would wait for it.
                print(line, end="", flush=True, file=shown(sys.stdout))


@contextmanager
def passed_on(child: subprocess.Popen) -> Iterator[None]:
    """Passes Ctrl-C on to the process of the run, which saves and stops. Elsewhere than in the main thread there are no
    signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGINT)
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
