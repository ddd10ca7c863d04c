"""Every call to Ray Train: it keeps the run (metrics, checkpoints, status page) and restarts the driver when its host dies."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

SETTINGS = {
    # report() takes 2 s at the default, and a dead driver is noticed that much later.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # So that the dashboard shows the run and its driver.
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    # It is for workers that train; ours is the driver.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
MAX_DRIVER_RESTARTS = 100


class JobFailed(Exception):
    """The driver's word that the run has failed and that trying again is of no use."""


class Reporter(Protocol):
    def report(self, metrics: dict[str, Any], checkpoint_path: str | None = None) -> None:
        """Returns at once; what is reported reaches Ray Train in order."""

    def close(self) -> None:
        """Waits, for a while, until all was delivered."""


class TrainReporter:
    """Reports from a thread of its own: the driver, which watches the gang, never waits for Ray Train."""

    CLOSE_TIMEOUT_S = 10.0

    def __init__(self, supervised: bool):
        self._supervised = supervised
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], str | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="ray-train-report", daemon=True)
        self._thread.start()

    def report(self, metrics: dict[str, Any], checkpoint_path: str | None = None) -> None:
        self._queue.put((metrics, checkpoint_path))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(self.CLOSE_TIMEOUT_S)

    def _deliver(self) -> None:
        import ray.train
        from ray.train.v2.api.report_config import CheckpointUploadMode

        while (item := self._queue.get()) is not None:
            metrics, path = item
            if path is None:
                ray.train.report(metrics)
                continue
            checkpoint = self._checkpoint(path)
            ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def _checkpoint(self, path: str) -> Any:
        import ray.train

        if not self._supervised:
            return ray.train.Checkpoint(path)
        # Not uploaded again: it lies under the run's storage already, and must be named on the very same filesystem object.
        storage = ray.train.get_context().get_storage()
        return ray.train.Checkpoint(path, filesystem=storage.storage_filesystem)


def fit(
    drive: Callable[[dict[str, Any], Reporter], None],
    message: dict[str, Any],
    *,
    name: str,
    storage: str,
    supervised: bool,
) -> None:
    """Runs `drive(message, reporter)` as Ray Train's single worker, or (not supervised) in this process.

    Blocks until it ends, raises what it raised. After any failure but FinalVerdict it is run again. `drive` must be importable by
    its name where the worker runs; `message` is what it needs, picklable.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        _worker,
        train_loop_config={"drive": drive, "message": message, "supervised": supervised},
        scaling_config=ScalingConfig(num_workers=1 if supervised else 0),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=MAX_DRIVER_RESTARTS),
            callbacks=[_stop_at_a_final_verdict()],
        ),
    )
    trainer.fit()


def _stop_at_a_final_verdict() -> Any:
    """Ray Train tries again after any exception of its worker; one of its controller's own ends the run as failed, at once."""
    from ray.train import UserCallback

    class StopAtFinalVerdict(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            for error in worker_exceptions.values():
                if JobFailed.__name__ in f"{type(error).__name__} {error!r}":
                    raise JobFailed(str(error))

    return StopAtFinalVerdict()


def _worker(config: dict[str, Any]) -> None:
    reporter = TrainReporter(config["supervised"])
    try:
        config["drive"](config["message"], reporter)
    finally:
        reporter.close()
