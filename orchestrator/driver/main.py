"""The driver's main function: makes a `Driver` from the run's storage, runs it, and writes the summary and the outcome."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from cluster.hosts.process_env import PRIVATE_UMASK
from gangway.storage import documents
from gangway.waits import Result, heeding, in_time, pause
from orchestrator.config.job import CONFIG, JobConfig, resolved_yaml, shown
from orchestrator.driver.ending import Ending, Progress, Superseded, TrainingFailed, ending
from orchestrator.driver.ray_train import JobFailed, Reporter
from orchestrator.planning.report import parameters
from orchestrator.report.child import write_report
from orchestrator.reporting.board import BoardLike
from orchestrator.reporting.console import LoggedBoard
from orchestrator.reporting.notifier import Notifier
from orchestrator.run_state import summary
from orchestrator.run_state.launch import HURRIED_CLOSE_TIMEOUT_S, TRACKING_CLOSE_TIMEOUT_S, Launch, open_launch
from orchestrator.run_state.lease import RunInUse
from orchestrator.run_state.outcome import FILE, read_outcome, set_damaged_aside, write_outcome
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.tracking import tags
from trainers.console.screens import CONSOLE_LOG
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About

STORAGE_DELAYS_S = (0.5, 1.0, 2.0, 5.0, *(10.0 for _ in range(60)))
"""The delays between a new driver's attempts to read the run's storage: ten minutes in all."""
REGISTRATION_TIMEOUT_S = 900.0
"""How much longer the end of a launch waits for the final model to be in MLflow, unless a stop is asked for. What is left then is
sent by the next start."""
END_TIMEOUT_S = 180.0
"""How long the conclusion of a launch may take, with the writes of a storage that may hang."""
END_TIMEOUT_OF_A_STOP_S = 20.0
LAST_TRY_S = 1.0
"""How long each write of a conclusion that is late may still take."""
NOTICES_CLOSE_TIMEOUT_S = 15.0
"""How long the end of a launch waits until its notices are sent."""


def drive(message: dict[str, Any], reporter: Reporter) -> None:
    """Runs the driver, as the worker of Ray Train, which calls it again after any failure of this process but JobFailed.

    Ray Train takes a return for success, so a failed run raises JobFailed. An outcome, once written, is final: a driver that is
    started again reports it and does nothing else.
    """
    # Imported here: this module is imported by the command, which does not need the driver.
    from orchestrator.driver.driver import Driver

    config, run_dir, launch_id, board = message["config"], message["run_dir"], message["launch_id"], message["board"]
    # First: in Ray Train's worker nobody has set the umask yet.
    keep_private(config)
    clock = steady_clock()
    # Before the lease: a driver that is started again after the end must not open the launch once more.
    # The board's first: the storage may not have been able to take it.
    begin = Begin(board)
    try:
        with heeding(begin.check_stop):
            outcome = board.outcome() or begin.when_storage_answers(lambda: read_outcome(run_dir, launch_id))
            if outcome is None:
                arguments = (run_dir, launch_id, message["started_at_s"], config.tracking, parameters(config), clock)
                launch = begin.when_storage_answers(lambda: open_launch(*arguments, begin.wait_for))
    except StoppedBefore as stop:
        board.conclude(stopped_before(launch_id, str(stop), board.stop_requested()))
        return
    except (RunInUse, documents.StorageError) as error:
        # To try again would only find the other launch, or the same document, again.
        raise JobFailed(str(error)) from error
    if outcome is None:
        notifier = Notifier(
            config.notify, config.training.name, run_dir, message["started_at_s"], lambda text: _warn(message["board"], text)
        )
        board = log = logged(board, launch, message, notifier)
        keep_configuration(launch, config)
        digest = {"gangway.configuration": summary.training_digest(shown(config))}
        launch.tracker.set_tags({**message.get("tags", {}), **tags.of_versions(summary.versions()), **digest})
        if damaged := set_damaged_aside(run_dir):
            _warn(board, damaged)
        result: dict[str, Any] = {}
        failure: TrainingFailed | None = None
        about = About(config.training.name, run_dir, shown(config))
        names, folders = config.training.recorders, config.training.recorder_folders
        recorders = Recorders(names, about, lambda message: _warn(board, message), folders=folders)
        try:
            result = Driver(config, launch, board, reporter, recorders, clock=clock).run()
        except TrainingFailed as error:
            failure = error
        except BaseException as error:
            recorders.close(close_timeout_s(board))
            if isinstance(error, Superseded):
                # No outcome is written: the run belongs to the other driver now.
                raise JobFailed(str(error)) from error
            raise
        progress = Progress(launch.progress.trained_step, *launch.saved_there())
        end = ending(result, failure, board.stop_requested(), progress)
        outcome = conclude(launch, board, config, recorders, end, result, clock)
        with suppress(TimeoutError):
            in_time(log.write, partial(close_timeout_s, board))
        notifier.close(HURRIED_CLOSE_TIMEOUT_S if hurried(board) else NOTICES_CLOSE_TIMEOUT_S)
    if outcome["status"] == "failed":
        raise JobFailed(outcome["error"])


def logged(board: BoardLike, launch: Launch, message: Mapping[str, Any], notifier: Notifier) -> LoggedBoard:
    """Returns the board, with `console.log` in the run's folder, which begins with what the command has shown; and with notices
    of what is posted."""
    folder = RunFolder(launch.run_dir)
    made = LoggedBoard(
        board,
        message["started_at_s"],
        lambda text: None if documents.is_url(launch.run_dir) else folder.append(CONSOLE_LOG, text),
        lambda work: launch.write_beside(CONSOLE_LOG, work),
        notifier.see,
    )
    for event in message.get("shown", ()) if launch.progress.drivers == 1 else ():
        made.show(event)
    return made


def keep_configuration(launch: Launch, config: JobConfig) -> None:
    """Writes `config.yaml`, the settings of the newest launch, to the run's folder, and has it tracked."""
    text, path = resolved_yaml(config), documents.join(launch.run_dir, CONFIG)

    def write() -> None:
        documents.write_text(path, text)
        launch.tracker.log_artifact(path)  # only now: what is tracked must be there

    launch.write_beside(CONFIG, write)


def keep_private(config: JobConfig) -> None:
    """Makes the files of this process, and of those that it starts, private to its user, unless `hosts.private_files` is
    false."""
    if config.hosts.private_files:
        os.umask(PRIVATE_UMASK)


def conclude(
    launch: Launch,
    board: BoardLike,
    config: JobConfig,
    recorders: Recorders,
    end: Ending,
    result: dict[str, Any],
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Writes the summary and then the outcome, which is last: a reader that finds it finds everything else too.

    Each is tried by itself. What cannot be written, such as on a disk that is full, is named in the outcome (`unwritten`); how
    the launch has ended does not depend on it.
    """
    unwritten = Unwritten(lambda: END_TIMEOUT_OF_A_STOP_S if board.stop_requested() else END_TIMEOUT_S + to_register_s)
    to_register_s = REGISTRATION_TIMEOUT_S if config.tracking.register_model else 0.0
    tracked_as = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[end.status]

    def document() -> dict[str, Any]:
        return summary.build(launch, end.status, result, end.error, clock(), shown(config))

    # Before the close, which ships what was tracked.
    unwritten.unless_done("the metrics of the end", lambda: summary.track(launch, recorders, document()))
    recorders.close(close_timeout_s(board))
    report = None
    if config.tracking.report and not hurried(board):
        report = unwritten.unless_done("the report", lambda: keep_report(launch, config))
    unwritten.unless_done("the model", lambda: register_model(launch, board, config, end))
    if undelivered := unwritten.unless_done("the state of the run", lambda: launch.close(tracked_as, close_timeout_s(board))):
        _warn(board, undelivered)
    elif model := launch.tracker.registered() if config.tracking.register_model else None:
        board.post({"ev": "note", "message": f"registered in MLflow: {model}", "level": "info"})
    # Built again after the close, so that it covers the time that the close took.
    final = document()
    unwritten.unless_done(summary.SUMMARY, lambda: summary.write(launch.run_dir, final))
    outcome = {
        "launch_id": launch.launch_id,
        "status": end.status,
        "stop_reason": result.get("stop_reason"),
        "error": end.error,
        "line": end.line,
        "unwritten": unwritten.texts,
    }
    unwritten.unless_done(FILE, lambda: write_outcome(launch.run_dir, outcome))
    # The command has it from here where the storage has not; and the next driver, which Ray Train may start, too.
    board.conclude(outcome)
    for text in unwritten.texts:
        _warn(board, f"not written: {text}")
    extra = {
        "name": config.training.name,
        "prompt": next(iter(config.training.previews.prompts), ""),
        "storage": launch.run_dir,
        "report": report,
        "checkpoints": documents.join(launch.run_dir, "checkpoints"),
        "logs": documents.join(launch.run_dir, "logs"),
        "mlflow": launch.tracker.where(),
    }
    board.post({"ev": "summary", "summary": {**final, **extra}})
    return outcome


def register_model(launch: Launch, board: BoardLike, config: JobConfig, end: Ending) -> None:
    """Has the model of a run that has finished registered in MLflow, if that is wanted. The close waits for it."""
    name, step, path = config.tracking.register_model, launch.progress.checkpoint_step, launch.progress.saved_path
    if name is None or end.status != "finished":
        return
    if step is None or path is None:
        raise OSError(f"there is no checkpoint to register as {name}")
    board.post({"ev": "note", "message": f"the model of step {step} is being registered in MLflow as {name}", "level": "info"})
    launch.tracker.register_model(name, path, step, lambda: 0.0 if board.stop_requested() else REGISTRATION_TIMEOUT_S)


def keep_report(launch: Launch, config: JobConfig) -> str:
    """Writes the report of the run, and has it tracked. Returns where it is. Raises OSError."""
    launch.flush(TRACKING_CLOSE_TIMEOUT_S)  # the page is made of what is in the files
    page, *pictures = write_report(launch.run_dir, figures=config.tracking.mlflow)
    for path in (page, *pictures):
        launch.tracker.log_artifact(path, tags.REPORT)
    return page


class Unwritten:
    """What of the conclusion could not be written, and why. A storage that hangs has as long as `limit_s` says for all of it."""

    def __init__(self, limit_s: Callable[[], float]) -> None:
        self.texts: list[str] = []
        self._limit_s, self._began_s = limit_s, time.monotonic()

    def unless_done(self, what: str, work: Callable[[], Result]) -> Result | None:
        """Returns what `work` returns; None, with a text more, if it raises or has no time left."""
        passed_s = time.monotonic() - self._began_s
        try:
            return in_time(work, lambda: max(LAST_TRY_S, self._limit_s() - passed_s))
        except Exception as error:  # the training is over and saved: nothing of this may make a failure of it
            self.texts.append(f"{what} ({(isinstance(error, OSError) and error.strerror) or error})")
            return None


def steady_clock() -> Callable[[], float]:
    """Returns a wall clock that does not jump: the time when this process began, plus the monotonic seconds since then."""
    began_s, monotonic_s = time.time(), time.monotonic()
    return lambda: began_s + time.monotonic() - monotonic_s


class StoppedBefore(Exception):
    """Somebody has asked for a stop before the run could be opened."""


def stopped_before(launch_id: str, why: str, reason: str | None) -> dict[str, Any]:
    """Returns the outcome of a launch that was stopped before it began. The storage cannot take it: the board has it alone."""
    line = f"stopped on request before the run went on: {why}; nothing was trained, and what was saved is as it was"
    return {"launch_id": launch_id, "status": "stopped", "stop_reason": reason, "error": None, "line": line, "unwritten": []}


class Begin:
    """The time until the run is open: its storage may not answer, and another driver may still have it."""

    def __init__(self, board: BoardLike):
        self._board, self._why = board, "its storage has not answered yet"

    def check_stop(self) -> None:
        """Called in every wait. Raises StoppedBefore if a stop is asked for."""
        if self._board.stop_requested():
            raise StoppedBefore(self._why)

    def wait_for(self, message: str) -> None:
        """Tells what is waited for now."""
        self._why = message
        _warn(self._board, message)

    def when_storage_answers(self, work: Callable[[], Result]) -> Result:
        """Repeats `work` while the storage fails, for minutes. If the driver died of it, each time would use up one of its
        restarts. Raises OSError when it has waited long enough."""
        reported = False
        for delay_s in (*STORAGE_DELAYS_S, None):
            try:
                return work()
            except OSError as error:
                if delay_s is None:
                    raise
                self._why = f"the run's storage could not be read: {error}"
                if not reported:
                    minutes = sum(STORAGE_DELAYS_S) / 60
                    _warn(self._board, f"the run's storage cannot be read, trying again for {minutes:.0f} minutes: {error}")
                reported = True
            pause(delay_s)
        raise AssertionError


def hurried(board: BoardLike) -> bool:
    """Returns whether this machine is about to be taken away, so that the end must be quick."""
    return board.stop_requested() == "terminated"


def close_timeout_s(board: BoardLike) -> float:
    """Returns how long the end waits for whoever keeps numbers."""
    return HURRIED_CLOSE_TIMEOUT_S if hurried(board) else TRACKING_CLOSE_TIMEOUT_S


def _warn(board: BoardLike, message: str) -> None:
    board.post({"ev": "note", "message": message, "level": "warning"})
