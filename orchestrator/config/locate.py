"""Finds a run's folder and its checkpoints by what a person names: a folder or a configuration."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.job import load
from orchestrator.run_state.launch import CHECKPOINTS, STATE
from trainers.checkpoint import committed
from trainers.program import program
from trainers.storage import documents


class NoRunError(Exception):
    """What was named is not a run."""


def parser_of_run(module: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of a command about a run, with what `checkpoints_of` takes: `run` and `overrides`. For
    `parse_intermixed_args`."""
    parser = argparse.ArgumentParser(prog=program(module), description=description)
    parser.add_argument("run", metavar="RUN_DIR|CONFIG", help="a run's folder, or the YAML file it was started with")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="those that the run was started with")
    return parser


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).exists() for name in (CHECKPOINTS, STATE, "driver_terms", committed.FILE))


def runs_in(storage: Path) -> list[Path]:
    """Returns the folders of the runs of a storage, by name. Raises OSError."""
    return sorted(Path(entry.path) for entry in os.scandir(storage) if entry.is_dir() and is_run(Path(entry.path)))


def checkpoints_of(run: str, overrides: Sequence[str] = ()) -> Path:
    """The folder of a run's checkpoints, which may not be there yet. Raises NoRunError or ConfigError."""
    if Path(run).is_dir():
        if not is_run(Path(run)):
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
