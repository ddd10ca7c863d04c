"""Exports models for Hugging Face from a run's checkpoints, while it trains."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from trainers import runtime
from trainers.callbacks.callback import Callback, RunInfo
from trainers.checkpoint import readers
from trainers.export import to_hugging_face


class HuggingFaceExport(Callback):
    """Writes `folder`/STEP for each checkpoint whose step is a multiple of `every_steps`, and for the last one.

    Host 0 makes the export from the checkpoint's files, which all hosts have written, in a thread of its own: no step waits, no
    device computes. A checkpoint is not deleted before its export is made. A failure is reported, and ends nothing.
    """

    def __init__(self, folder: str, every_steps: int | None = None):
        self.folder, self.every_steps = folder, every_steps
        self._thread = ThreadPoolExecutor(1, "hugging-face")
        self._exports: dict[int, Future[None]] = {}
        self._last: tuple[int, str] | None = None

    def on_save(self, state: RunInfo, *, step: int, path: str, **kwargs: Any) -> None:
        self._last = (step, path)
        if self.every_steps is not None and step % self.every_steps == 0:
            self._start(step, path)

    def on_train_end(self, state: RunInfo, **kwargs: Any) -> None:
        if self._last is not None and self._last[0] not in self._exports:
            self._start(*self._last)
        if self._exports:
            # The exports may take long: the watchdog then uses the limit for saving.
            runtime.current().phase("save")
        for export in self._exports.values():
            # The process ends after this: an export in progress would be lost.
            export.result()
        self._exports = {}

    def _start(self, step: int, path: str) -> None:
        if jax.process_index() == 0:
            readers.begin(path)
            self._exports[step] = self._thread.submit(self._export, step, path)

    def _export(self, step: int, path: str) -> None:
        try:
            # An existing export may come from before a rollback: it was trained on batches that are left out now.
            to_hugging_face(path, os.path.join(self.folder, str(step)), replace=True)
        except Exception as error:  # a thread's boundary: reported, training goes on
            runtime.current().note(f"no export of step {step} for Hugging Face: {type(error).__name__}: {error}")
        finally:
            readers.end(path)
