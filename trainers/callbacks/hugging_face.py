"""Exports models for Hugging Face from a run's checkpoints, while it trains."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from gangway.errors import CheckpointError
from gangway.storage import ours
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from trainers import runtime
from trainers.callbacks.callback import Callback, RunInfo
from trainers.checkpoint import layout
from trainers.checkpoint.export import on_the_way, to_hugging_face

FAILED = "failed"
"""The file that a host leaves in the folder on the way when it cannot write its part."""
WAIT_S = 1800.0
"""How long host 0 waits for the files of the others."""
POLL_S = 0.2


class HuggingFaceExport(Callback):
    """Writes `folder`/STEP for each checkpoint whose step is a multiple of `every_steps`, and for the last one.

    Host 0 makes the export from the checkpoint's files, which all hosts have written, in a thread of its own: no step waits, no
    device computes. A checkpoint is not deleted before its export is made. A failure is reported, and ends nothing.

    With `all_hosts`, each host writes its share of the files of weights. All hosts must see `folder`.
    """

    def __init__(self, folder: str, every_steps: int | None = None, *, all_hosts: bool = False):
        self.folder, self.every_steps, self.all_hosts = folder, every_steps, all_hosts
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
        if jax.process_index() == 0 or self.all_hosts:
            layout.readers(path, 1)
            self._exports[step] = self._thread.submit(self._export, step, path)

    def _export(self, step: int, path: str) -> None:
        out = Path(self.folder, str(step))
        try:
            # An existing export may come from before a rollback: it was trained on batches that are left out now.
            if self.all_hosts:
                self._together(place_of(path), out)
            else:
                to_hugging_face(path, out, replace=True)
        except Exception as error:  # a thread's boundary: reported, training goes on
            runtime.current().note(f"no export of step {step} for Hugging Face: {type(error).__name__}: {error}")
        finally:
            layout.readers(path, -1)

    def _together(self, path: Place, out: Path) -> None:
        work, host = on_the_way(path, out), jax.process_index()
        try:
            to_hugging_face(path, out, replace=True, host=host, num_hosts=jax.process_count())
        except Exception:
            # For host 0, which waits for this one's files.
            with suppress(OSError):
                (work / FAILED).touch()
            raise
        # Host 0 deletes checkpoints: this one is needed until the others are done with it.
        deadline_s = time.monotonic() + WAIT_S
        while host == 0 and work.exists():
            if (work / FAILED).exists() or time.monotonic() > deadline_s:
                with suppress(OSError):
                    ours.delete(work, ours.ON_THE_WAY)
                raise CheckpointError(f"another host did not write its part of {out}: do all hosts see {self.folder}?")
            time.sleep(POLL_S)
