"""Weights & Biases, an optional extra. Its environment variables, such as `WANDB_PROJECT` and `WANDB_MODE`, apply as usual.

W&B runs a process of its own, `wandb-core`, which writes and uploads.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from gangway.published import Distribution
from gangway.storage import durable, identity
from trainers.recorders.recorder import About

SERVICE = "wandb-core"


class WeightsAndBiases:
    """Records to one W&B run over all restarts. W&B itself drops what comes for a step that it has passed."""

    def __init__(self, about: About):
        import wandb

        self._wandb = wandb
        # Before `init`, which may hang too: the service's own exit handler waits for it without a limit. Handlers run in reverse
        # order, so ours must be the later one.
        wandb.setup()
        atexit.unregister(end_service)
        atexit.register(end_service)
        # W&B would write to a temporary folder if this one did not exist.
        folder = about.output_folder()
        durable.make_folder(folder)
        # A run that a program of the user has begun in this process goes on beside this one.
        settings = wandb.Settings(reinit="create_new")
        if "WANDB_CONSOLE" not in os.environ:
            # Else W&B puts objects of its own in the place of `sys.stdout` and `sys.stderr`.
            settings.console = "off"
        self._run = wandb.init(
            # A restart finds the same W&B run, wherever the run's folder is by then.
            id=identity.of(about.folder).id,
            resume="allow",
            name=about.name,
            dir=str(folder),
            config=dict(about.settings),
            settings=settings,
        )

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        shapes = {name: self._histogram(shape) for name, shape in distributions.items()}
        self._run.log({**metrics, **shapes}, step=step)

    def close(self) -> None:
        self._run.finish()
        # The service would live as long as this process.
        self._wandb.teardown()
        atexit.unregister(end_service)

    def _histogram(self, shape: Distribution) -> object:
        edges = np.linspace(shape.min, shape.max, len(shape.counts) + 1)
        return self._wandb.Histogram(np_histogram=(np.array(shape.counts), edges))


def end_service() -> None:
    """Kills the service of a recorder that nobody waits for any longer, as the process ends. What was recorded is on the disk."""
    import psutil
    import wandb

    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() == SERVICE:
                child.kill()
    # Unregisters W&B's own exit handler; what it cannot send to the dead service is an error, or a CancelledError of asyncio,
    # which is no Exception. This process is ending in any case.
    with suppress(BaseException):
        wandb.teardown()
