"""Models for Hugging Face, made of a run's checkpoints while it goes on."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from trainers import runtime
from trainers.callbacks.callback import Callback, RunInfo
from trainers.export import to_hugging_face


class HuggingFaceExport(Callback):
    """Writes `folder`/STEP for each checkpoint whose step is a multiple of `every_steps`, and for the last one.

    Host 0 makes it from the checkpoint's files, which all hosts have written, in a thread of its own: no step waits, no device
    computes. A failure is told, and ends nothing. `checkpoint.save_total_limit` must leave a checkpoint there for as long as it
    takes.
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
            runtime.current().phase("save")
        for export in self._exports.values():
            export.result()
        self._exports = {}

    def _start(self, step: int, path: str) -> None:
        if jax.process_index() == 0:
            self._exports[step] = self._thread.submit(self._export, step, path)

    def _export(self, step: int, path: str) -> None:
        try:
            # One that is there is of an earlier life of the run, which may have trained on batches that were left out since.
            to_hugging_face(path, os.path.join(self.folder, str(step)), replace=True)
        except Exception as error:  # a thread's boundary: told, training goes on
            runtime.current().note(f"no export of step {step} for Hugging Face: {type(error).__name__}: {error}")
