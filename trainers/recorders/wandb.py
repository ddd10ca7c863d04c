"""Weights & Biases, an optional extra. `WANDB_PROJECT`, `WANDB_MODE` and its other variables hold as always."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from trainers.recorders.recorder import About, Distribution


class WeightsAndBiases:
    """One run over all restarts. It drops what comes for a step that it is past by itself."""

    def __init__(self, about: About):
        import wandb

        key = hashlib.sha256(about.folder.encode()).hexdigest()[:16]
        self._wandb = wandb
        self._run = wandb.init(id=key, resume="allow", name=about.name, dir=about.folder, config=dict(about.settings))

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        shapes = {name: self._histogram(shape) for name, shape in distributions.items()}
        self._run.log({**metrics, **shapes}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _histogram(self, shape: Distribution) -> object:
        edges = np.linspace(shape.min, shape.max, len(shape.counts) + 1)
        return self._wandb.Histogram(np_histogram=(np.array(shape.counts), edges))
