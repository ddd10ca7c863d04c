"""The driver's main: from the run's storage to a `Driver`, and from its end to a summary and an outcome."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cluster.hosts.process_env import PRIVATE_UMASK
from orchestrator.config.job import JobConfig, shown
from orchestrator.driver.ray_train import JobFailed, Reporter
from orchestrator.events import BoardLike
from orchestrator.planning import report as plan
from orchestrator.run_state import outcome, summary
from orchestrator.run_state.launch import HURRIED_CLOSE_TIMEOUT_S, TRACKING_CLOSE_TIMEOUT_S, Launch, take_up
from orchestrator.run_state.lease import RunInUse
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About
from trainers.runtime.stop_reason import StopReason
from trainers.storage import documents

STORAGE_DELAYS_S = (0.5, 1.0, 2.0, 5.0, *(10.0 for _ in range(60)))
"""Between a new driver's tries to read what the run's storage knows: ten minutes of them."""
Result = TypeVar("Result")


def drive(message: dict[str, Any], reporter: Reporter) -> None:
    """The driver's main, as Ray Train's worker; called again after any other failure of this process.

    Ray Train takes a return for success. So a failure is raised, and a verdict, once there, is final: it is raised again.
    """
    from orchestrator.driver.driver import Driver
    from orchestrator.driver.errors import Superseded, TrainingFailed

    config, run_dir, launch_id, board = message["config"], message["run_dir"], message["launch_id"], message["board"]
    keep_private(config)
    clock = steady_clock()
    verdict = when_storage_answers(lambda: outcome.read(run_dir, launch_id), board)
    if verdict is None:
        try:
            facts = (run_dir, launch_id, message["started_at_s"], config.tracking, plan.parameters(config), clock)
            job = when_storage_answers(lambda: take_up(*facts, lambda message: _warn(board, message)), board)
        except RunInUse as error:
            raise JobFailed(str(error)) from error
        status, result, failure = "failed", {}, None
        known = About(config.training.name, run_dir, shown(config))
        recorders = Recorders(config.training.recorders, known, lambda message: _warn(board, message))
        try:
            result = Driver(config, job, board, reporter, recorders, clock=clock).run()
            status = "finished" if StopReason(result["stop_reason"]).finished else "stopped"
        except Superseded as error:
            raise JobFailed(str(error)) from error
        except TrainingFailed as error:
            failure = str(error)
            status = "stopped" if board.stop_requested() else "failed"
        finally:
            recorders.close(HURRIED_CLOSE_TIMEOUT_S if hurried(board) else TRACKING_CLOSE_TIMEOUT_S)
        verdict = conclude(job, board, config, status, result, failure, clock)
    if verdict["status"] == "failed":
        raise JobFailed(verdict["error"])


def keep_private(config: JobConfig) -> None:
    """What this process, and those that it starts, will write is for its user alone, unless the configuration says otherwise."""
    if config.hosts.private_files:
        os.umask(PRIVATE_UMASK)


def conclude(
    job: Launch,
    board: BoardLike,
    config: JobConfig,
    status: str,
    result: dict[str, Any],
    error: str | None,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Writes the summary and, last of all, the verdict: whoever finds it finds everything else."""
    tracked_as = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[status]
    summary.track(job, summary.build(job, status, result, error, clock()))
    left = job.close(tracked_as, HURRIED_CLOSE_TIMEOUT_S if hurried(board) else TRACKING_CLOSE_TIMEOUT_S)
    made = summary.build(job, status, result, error, clock())
    summary.write(job.run_dir, made)
    if left:
        _warn(board, left)
    extra = {
        "name": config.training.name,
        "prompt": next(iter(config.training.previews.prompts), ""),
        "storage": job.run_dir,
        "checkpoints": documents.join(job.run_dir, "checkpoints"),
        "mlflow": job.tracker.where(),
    }
    board.post({"ev": "summary", "summary": {**made, **extra}})
    verdict = {"launch_id": job.launch_id, "status": status, "stop_reason": result.get("stop_reason"), "error": error}
    outcome.write(job.run_dir, verdict)
    return verdict


def steady_clock() -> Callable[[], float]:
    """The wall clock as it was when this process began, plus the seconds since: a clock that is set does not move it."""
    began_s, monotonic_s = time.time(), time.monotonic()
    return lambda: began_s + time.monotonic() - monotonic_s


def when_storage_answers(work: Callable[[], Result], board: BoardLike, sleep: Callable[[float], None] = time.sleep) -> Result:
    """Does `work` again and again while the storage fails, for minutes: a driver that dies of it uses up a restart each time."""
    told = False
    for delay_s in (*STORAGE_DELAYS_S, None):
        try:
            return work()
        except OSError as error:
            if delay_s is None:
                raise
            if not told:
                _warn(board, f"the run's storage cannot be read, trying again: {error}")
            told = True
            sleep(delay_s)
    raise AssertionError


def hurried(board: BoardLike) -> bool:
    """Whether this machine is about to be taken away."""
    return board.stop_requested() == "terminated"


def _warn(board: BoardLike, message: str) -> None:
    board.post({"ev": "note", "message": message, "level": "warning"})
