"""Every call to Ray Train: it keeps the run (metrics, checkpoints, status page) and restarts the driver when its host dies."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from gangway.storage import documents

SETTINGS = {
    # report() takes 2 s at the default, and a dead driver is noticed that much later.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # So that the dashboard's `/api/train/v2/runs/v1` has the run and its driver; Ray 2.60 has no page for them.
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    # It is for workers that train; ours is the driver.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
REPORTED = "checkpoint_manager_snapshot.json"
"""Ray Train's list, in the run's folder, of the checkpoints that were reported to it."""
# Bounded: a driver that can never start must not be tried for ever.
MAX_DRIVER_RESTARTS = 100

log = logging.getLogger(__name__)


class JobFailed(Exception):
    """The run has failed, and running the driver again is of no use."""


class Reporter(Protocol):
    def report(self, metrics: dict[str, Any], checkpoint_path: str | None = None) -> None:
        """Reports metrics, and a checkpoint if one is given. Returns at once; reports reach Ray Train in order."""

    def close(self) -> None:
        """Waits, for a limited time, until all reports are delivered."""


class TrainReporter:
    """Reports from a background thread: the driver, which watches the gang, must not wait for Ray Train.

    Ray Train takes a report in 0.2 s, and a run may publish more often. Metrics that wait are put together: Ray Train has the
    newest value of each, and never falls behind. Each checkpoint is a report of its own.
    """

    CLOSE_TIMEOUT_S = 10.0

    def __init__(self, supervised: bool):
        self._supervised = supervised
        self._waiting: deque[tuple[dict[str, Any], str | None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._deliver, name="ray-train-report", daemon=True)
        self._thread.start()

    def report(self, metrics: dict[str, Any], checkpoint_path: str | None = None) -> None:
        with self._changed:
            if checkpoint_path is None and self._waiting and self._waiting[-1][1] is None:
                metrics = {**self._waiting.pop()[0], **metrics}
            self._waiting.append((metrics, checkpoint_path))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(self.CLOSE_TIMEOUT_S)
        with self._changed:
            if self._waiting:
                log.warning("%d reports did not reach Ray Train within %.0f s", len(self._waiting), self.CLOSE_TIMEOUT_S)
            # Ray Train does not end a worker as long as there are reports.
            self._waiting.clear()

    def _next(self) -> tuple[dict[str, Any], str | None] | None:
        """Waits for a report. Returns None when it is closed and there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None

    def _deliver(self) -> None:
        while (item := self._next()) is not None:
            self._send(*item)

    def _send(self, metrics: dict[str, Any], checkpoint_path: str | None) -> None:
        """Returns when Ray Train has taken it."""
        import ray.train
        from ray.train.v2.api.report_config import CheckpointUploadMode

        if checkpoint_path is None:
            ray.train.report(metrics)
            return
        checkpoint = self._checkpoint(checkpoint_path)
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def _checkpoint(self, path: str) -> Any:
        import ray.train

        if not self._supervised:
            return ray.train.Checkpoint(path)
        # Not uploaded again: it lies under the run's storage already, and must be named on the very same filesystem object.
        storage = ray.train.get_context().get_storage()
        path = path.partition("://")[2] if documents.is_url(path) else path
        return ray.train.Checkpoint(path, filesystem=storage.storage_filesystem)


def import_ray_train() -> None:
    """Imports what `fit` needs, which takes about a second: so that it is done while something else is waited for."""
    import ray.train.v2.api.data_parallel_trainer  # noqa: F401


def fit(
    drive: Callable[[dict[str, Any], Reporter], None],
    message: dict[str, Any],
    *,
    name: str,
    storage: str,
    supervised: bool,
) -> None:
    """Runs `drive(message, reporter)` as Ray Train's single worker, or (not supervised) in this process.

    Blocks until it ends, and raises what it raised. After any failure but JobFailed it is run again. `drive` must be importable
    by its name where the worker runs; `message` must be picklable.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    # The list of the launch before. Ray Train does not start if a checkpoint in it is gone, and ours are deleted when newer ones
    # are complete. Nothing reads it: the hosts choose the checkpoint.
    with suppress(FileNotFoundError):
        documents.delete(documents.join(storage, name, REPORTED))
    filesystem, storage_path = _filesystem(storage)
    trainer = DataParallelTrainer(
        _worker,
        train_loop_config={"drive": drive, "message": message, "supervised": supervised},
        scaling_config=ScalingConfig(num_workers=1 if supervised else 0),
        run_config=RunConfig(
            name=name,
            storage_path=storage_path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=MAX_DRIVER_RESTARTS),
            callbacks=[_stop_at_job_failed()],
        ),
    )
    trainer.fit()


def _filesystem(storage: str) -> tuple[Any, str]:
    """Returns the filesystem of PyArrow for Ray Train and the path in it; None for the one of the machine. Through fsspec, which
    reads keys and endpoints as the rest of a run does."""
    if not documents.is_url(storage):
        return None, storage
    import fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    scheme, _, path = storage.partition("://")
    return PyFileSystem(FSSpecHandler(fsspec.filesystem(scheme))), path


def _stop_at_job_failed() -> Any:
    """Returns a callback that ends the run when the worker raises JobFailed.

    Ray Train runs its worker again after any exception. An exception in a callback of its controller ends the run at once.
    """
    from ray.train import UserCallback

    class StopAtJobFailed(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            for error in worker_exceptions.values():
                # By name: Ray wraps the exception of a worker, and its type is lost.
                if JobFailed.__name__ in f"{type(error).__name__} {error!r}":
                    raise JobFailed(str(error))

    return StopAtJobFailed()


def _worker(config: dict[str, Any]) -> None:
    reporter = TrainReporter(config["supervised"])
    try:
        config["drive"](config["message"], reporter)
    finally:
        # After a failure too: what was reported before it still reaches Ray Train.
        reporter.close()
