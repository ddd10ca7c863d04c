"""One use of the command `python -m orchestrator.run`: checks the configuration, connects to Ray or starts it, runs the driver,
and shows what happens."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from gangway.config.masking import masked
from gangway.program import Signalled
from gangway.stop_reason import StopReason
from gangway.storage import documents
from gangway.storage.probe import check_writable, no_folder_if_refused
from gangway.terminal import OF_AN_END, arrived, handling
from gangway.wire.console import Note, Status
from orchestrator.config.job import ConfigError, JobConfig, load, shown
from orchestrator.driver import head
from orchestrator.driver.main import drive, keep_private
from orchestrator.driver.ray_cluster import connect, disconnect, head_address, stop_own_job
from orchestrator.driver.ray_train import fit, import_ray_train
from orchestrator.failures.classify import explain_missing_code
from orchestrator.planning import report
from orchestrator.planning.child import PlanError
from orchestrator.reporting.board import Board, BoardLike, start_remote_board
from orchestrator.reporting.console import Console, make_console, watch
from orchestrator.run_state import fresh
from orchestrator.run_state.lease import RunInUse, check_free
from orchestrator.run_state.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_REFUSED, EXIT_STOPPED, finished_at, read_outcome
from orchestrator.run_state.summary import SUMMARY
from orchestrator.run_state.versions import check_versions
from orchestrator.tracking import tags
from trainers.console.screens import CONSOLE_LOG

REFUSALS = (ConfigError, head.ClusterError, RunInUse, documents.StorageError, OSError)
"""What is wrong before a run begins, and about which its user can do something."""
JOB_STOP_GRACE_S = 3.0
"""How long after SIGTERM `ray job stop` sends SIGKILL."""
TERMINATED = "terminated"
"""The request of SIGTERM. `ray job stop` sends it: Ray knows of the stop already."""
LEAVE_TIMEOUT_S = 5.0
"""How long Ray may take to shut down when its head is gone."""


class EndedAtOnce(Exception):
    """Somebody has interrupted the command twice: it did not wait for the driver to save."""


def run(
    path: str,
    overrides: Sequence[str],
    *,
    began_s: float,
    begin_anew: bool = False,
    only_tell: bool = False,
    everything: bool = False,
) -> int:
    """Runs the job of a configuration, or only tells what it would be; `everything`: with all settings. `began_s`: when the
    command began, by the monotonic clock; all times that it shows count from then. `begin_anew`: the folder of an earlier run is
    moved aside. Returns the exit status."""
    try:
        config = load(path, overrides)
        if only_tell:
            print(dry_run(config, begin_anew=begin_anew, everything=everything))
            return EXIT_FINISHED if arrived() else EXIT_FAILED
        return launch(config, began_s, fresh=begin_anew)
    except REFUSALS as error:
        print(f"error: {masked(str(error))}", file=sys.stderr)
        return EXIT_REFUSED
    except (PlanError, EndedAtOnce) as error:
        print(f"error: {masked(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    except SystemExit as error:
        # Importing Ray puts a handler of SIGTERM in the place of ours, and it ends the process so.
        if error.code != signal.SIGTERM:
            raise
        raise Signalled(signal.SIGTERM) from None


def nothing_to_do(config: JobConfig, step: int) -> str:
    return (
        f"{config.training.name}: finished already at step {step:,}: nothing to do; its numbers are in "
        f"{documents.join(config.run_dir, SUMMARY)}; to train on, raise max_num_steps, or whatever has ended it; to train anew, "
        "call it with --fresh"
    )


def dry_run(config: JobConfig, *, begin_anew: bool = False, everything: bool = False) -> str:
    """Returns what the run would be, as text. Raises ConfigError."""
    plan = report.check(config)
    if not begin_anew or not fresh.is_begun(config.run_dir):
        return report.render(config, plan, everything=everything)
    plan = dataclasses.replace(plan, continues=None)
    moved = f"# {'begins anew':<18}{config.run_dir} is moved to {fresh.place_for(config.run_dir)}"
    return f"{report.render(config, plan, everything=everything)}\n{moved}"


def launch(config: JobConfig, began_s: float, *, fresh: bool = False) -> int:
    """Runs the job, and shows what it does. Returns the exit status."""
    # Before Ray, and before a machine is asked for.
    if not fresh and (step := finished_at(config.run_dir, shown(config))) is not None:
        print(nothing_to_do(config, step))
        return EXIT_FINISHED
    outcome, error, lost = run_job(config, began_s, begin_anew=fresh)
    status = exit_status(outcome, error, lost)
    if status == EXIT_STOPPED and outcome and outcome["asked"] != TERMINATED:
        stop_own_job(os.environ)
    return status


def run_job(
    config: JobConfig, began_s: float, *, begin_anew: bool = False
) -> tuple[dict[str, Any] | None, BaseException | None, str | None]:
    """Checks the configuration, connects to Ray, runs the driver, and shows its events.

    Returns the outcome, with why somebody has asked for a stop (`asked`). Without one, returns the error with which the driver
    ended, and why the head of the cluster is gone.
    """
    started_at_s = time.time() - (time.monotonic() - began_s)
    # Before anything is written.
    keep_private(config)
    run_dir, code = config.run_dir, tags.reading_code(os.getcwd())
    with no_folder_if_refused(run_dir), fresh.moved_aside(run_dir, begin_anew, check_free) as moved:
        plan, supervised, console = checked(config, began_s)
    launch_id = uuid.uuid4().hex[:12]
    board = start_remote_board() if supervised else Board()
    first = [*plan.events(config), *(Note(ev="note", message=line) for line in filter(None, (moved, where_printed(config))))]
    for event in first:
        board.post(event)
    message: dict[str, Any] = {"config": config, "board": board, "launch_id": launch_id, "run_dir": run_dir}
    # Here, and not in the driver, which may run in another folder or on another machine.
    made_by = {**tags.of_user(sys.argv), **code()}
    message |= {"started_at_s": started_at_s, "shown": first, "tags": made_by}
    errors: list[BaseException] = []

    def run_driver() -> None:
        try:
            fit(drive, message, name=config.training.name, storage=config.training.storage, supervised=supervised)
        except BaseException as error:  # a thread's boundary: shown by the main thread
            errors.append(error)

    # Off the main thread: there Ray Train would take SIGINT for itself.
    driver = threading.Thread(target=run_driver, name="driver", daemon=True)
    driver.start()
    # To the end, and not only while it trains: a signal that comes late changes neither what is saved nor the exit status.
    with handling(Relay(board, run_dir, launch_id).on_signal, *OF_AN_END):
        try:
            own_died = partial(board.request_stop, StopReason.HEAD_LOST) if is_own_ray(config) else None
            with head.HeadWatch(head_address(), run_dir, console.show, own_died) as head_watch:
                watch(board, console, lambda: head_watch.over or not driver.is_alive())
        except KeyboardInterrupt as error:
            raise EndedAtOnce(
                f"interrupted twice: not waited for; the next launch goes on from the newest checkpoint in {run_dir}/checkpoints"
            ) from error
        # By the file: Ray wraps the exceptions of a worker, and their types are lost.
        outcome = outcome_of(board, run_dir, launch_id)
        asked = board.stop_requested()
        lost = head_watch.why_lost() if outcome is None or asked == StopReason.HEAD_LOST else None
        leave(driver, has_head=lost is None)
    return outcome and {**outcome, "asked": asked}, next(iter(errors), None), lost


def is_own_ray(config: JobConfig) -> bool:
    """Returns whether the command starts a Ray, and joins none."""
    address, _ = head.named(os.environ, config.driver.address) or ("local", "")
    return address == "local"


def where_printed(config: JobConfig) -> str:
    """Returns the line that says where the output of the hosts is; an empty one if the console shows it."""
    if config.driver.console_hosts:
        return ""
    logs = documents.join(config.run_dir, "logs")
    return f"what the hosts print (print, logging) is in {logs}; driver.console_hosts=all shows it here"


def checked(config: JobConfig, began_s: float) -> tuple[report.PlanReport, bool, Console]:
    """Returns what `plan_and_connect` does, and the console. Raises what is wrong with the configuration, the storage or the
    cluster."""
    # All of this before Ray is started: a wrong configuration is reported within a second.
    check_writable(config.run_dir)
    check_free(config.run_dir)
    check_versions(config.run_dir)
    if named := head.named(os.environ, config.driver.address):
        head.check(*named)
    console, plan = make_console(sys.stdout, began_s, log=documents.join(config.run_dir, CONSOLE_LOG), logged=True), None
    try:
        plan, supervised = plan_and_connect(config, console)
    finally:
        if plan is None:  # what is said of an error must not be drawn into the live lines
            console.close()
    return plan, supervised, console


def plan_and_connect(config: JobConfig, console: Console) -> tuple[report.PlanReport, bool]:
    """Returns what the run will be, and whether Ray Train supervises the driver. The child that works out the plan runs while Ray
    starts and is imported: no machine is asked for before the plan is known to be good."""
    console.show(Status(ev="status", state="checking"))
    with report.start(config) as plan:
        try:
            supervised = connect(config)
            import_ray_train()
            return report.answered(config, plan), supervised
        except BaseException:
            disconnect()
            raise


def outcome_of(board: BoardLike, run_dir: str, launch_id: str) -> dict[str, Any] | None:
    """Returns how the launch has ended: by the run's folder, or by the board where the storage could not take it; else None."""
    with suppress(OSError, documents.StorageError):
        if (outcome := read_outcome(run_dir, launch_id)) is not None:
            return outcome
    return board.outcome()


def leave(driver: threading.Thread, has_head: bool) -> None:
    """Ends the connection to Ray. In order: otherwise Ray's own processes would be left behind."""
    if has_head:
        driver.join()
        disconnect()
        return
    # Ray may wait for the head that is gone.
    leaving = threading.Thread(target=disconnect, name="leave Ray", daemon=True)
    leaving.start()
    leaving.join(LEAVE_TIMEOUT_S)


# ---------------------------------------------------------------------- signals and exit


class Relay:
    """SIGINT, SIGTERM, and SIGHUP when the terminal is closed, ask the driver to save and stop. A second SIGINT ends this command
    at once."""

    def __init__(self, board: BoardLike, run_dir: str, launch_id: str):
        self.board, self.run_dir, self.launch_id = board, run_dir, launch_id
        self.asked_at_s: float | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked_at_s is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked_at_s = time.monotonic()
        reason = TERMINATED if number == signal.SIGTERM else "interrupted"
        # In another thread: the board may be an actor, and Ray's calls must not be made in a signal handler.
        threading.Thread(target=self._request_stop, args=(reason,), daemon=True).start()
        if number == signal.SIGTERM:
            late = threading.Timer(JOB_STOP_GRACE_S - 0.5, self._too_late)
            late.daemon = True
            late.start()

    def _request_stop(self, reason: str) -> None:
        with suppress(Exception):  # the run is over, and with it the actor, or Ray itself
            self.board.request_stop(reason)

    def _too_late(self) -> None:
        if outcome_of(self.board, self.run_dir, self.launch_id) is not None:
            return  # the run is saved and its outcome written: only Ray is still shutting down
        print(
            f"SIGTERM: the state is not saved yet, after {JOB_STOP_GRACE_S - 0.5:.1f} s; if this process is killed before it is, "
            f"the next launch goes on from the newest checkpoint in {self.run_dir}/checkpoints",
            file=sys.stderr,
            flush=True,
        )


def exit_status(outcome: dict[str, Any] | None, error: BaseException | None, lost: str | None) -> int:
    """`lost`: why the head of the cluster is gone."""
    if outcome is None:
        print(f"error: {why_no_outcome(error, lost)}", file=sys.stderr)
        return EXIT_FAILED
    if outcome["status"] == "failed":
        print(f"\nerror: {outcome['error']}", file=sys.stderr)
    elif outcome["status"] == "stopped" and lost is not None:
        print(f"\nerror: {lost}", file=sys.stderr)
    if unwritten := outcome.get("unwritten"):
        print(f"{outcome['status']}; could not be written: {'; '.join(unwritten)}", file=sys.stderr)
    if line := outcome.get("line"):
        print(masked(line), file=sys.stderr)
    if outcome["status"] == "finished":
        return EXIT_FINISHED
    return EXIT_STOPPED if outcome["status"] == "stopped" and lost is None else EXIT_FAILED


def why_no_outcome(error: BaseException | None, lost: str | None) -> str:
    return masked(lost or explain_missing_code(str(error)) or f"the driver ended without an outcome: {error!r}")
