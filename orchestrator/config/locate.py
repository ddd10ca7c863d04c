"""Finds a run's folder and its checkpoints by what a person names: a folder or a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.job import load
from orchestrator.run_state.launch import CHECKPOINTS, STATE
from trainers.checkpoint import committed
from trainers.storage import documents


class NoRunError(Exception):
    """What was named is not a run."""


def checkpoints_of(run: str, overrides: Sequence[str] = ()) -> Path:
    """The folder of a run's checkpoints, which may not be there yet. Raises NoRunError or ConfigError."""
    if Path(run).is_dir():
        if not any((Path(run) / name).exists() for name in (CHECKPOINTS, STATE, "driver_terms", committed.FILE)):
            raise NoRunError(f"{run} is not a run's folder: expected one with {CHECKPOINTS}/ in it, such as STORAGE/NAME")
        return Path(run) / CHECKPOINTS
    if not Path(run).exists() and Path(run).suffix not in (".yaml", ".yml"):
        raise NoRunError(f"there is no {run}: give a run's folder, or the YAML file it was started with")
    run_dir = load(run, overrides).run_dir
    if documents.is_url(run_dir):
        raise NoRunError(f"{run_dir} is no local or mounted folder: mount the bucket, and give the run's folder in it")
    if not Path(run_dir).is_dir():
        raise NoRunError(f"{run} was not started yet with this storage and name: there is no {run_dir}")
    return Path(run_dir) / CHECKPOINTS
