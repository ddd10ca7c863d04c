"""Where what a run has saved lies: the name of its folder says more than the step."""

from __future__ import annotations

import os
from pathlib import Path

from gangway.storage.opening import place_of
from trainers.checkpoint import layout


def saved(run: str | os.PathLike[str], step: int, folder: str = "checkpoints") -> Path:
    """Returns the folder of the checkpoint, or with `models` of the model, of a step in a run on this machine; if there is none,
    one that is not there."""
    return layout.at(place_of(run) / folder, step).path
