"""Finds a run's folder and its checkpoints by what a person names: a folder or a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gangway.program import Parser
from gangway.storage import documents
from gangway.storage.object_store import FOR_PEOPLE
from gangway.storage.opening import place_of_run
from gangway.storage.row import FOLDER
from gangway.storage.store import Place
from orchestrator.config.job import ConfigError, load
from orchestrator.run_state.stored import CHECKPOINTS, STATE
from trainers.checkpoint import copied

RUN_HELP = "a run's folder, its URL in a bucket, or the YAML file that it was started with"


class NoRunError(Exception):
    """What was named is not a run."""


REFUSALS = (ConfigError, NoRunError, documents.StorageError, OSError)
"""What a command that reads a run may raise: its user can do something about it."""


def parser_of_run(module: str, about: str, *, example: str) -> Parser:
    """Returns the parser of a command about a run, with what `run_of` takes: `run` and `overrides`. For
    `parse_intermixed_args`."""
    parser = Parser(module, about, example=example)
    parser.add_argument("run", metavar="RUN|CONFIG", help=RUN_HELP)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="those that the run was started with")
    return parser


def is_run(place: Place) -> bool:
    """Whether a folder is that of a run. Raises OSError."""
    inside = {*place.folders()}
    return bool(inside & {CHECKPOINTS, FOLDER}) or (place / STATE).exists()


def runs_in(storage: Place) -> list[Place]:
    """Returns the folders in a storage that may be runs, by name; in a bucket nobody has looked yet whether they are, for each
    look is paid for. Raises OSError."""
    if not storage.store.is_local:
        return [storage / name for name in storage.folders()]
    # Links count here: a run may lie on another disk.
    found = sorted(path for path in Path(storage.url).iterdir() if path.is_dir())
    return [place for path in found if is_run(place := storage / path.name)]


def run_of(run: str, overrides: Sequence[str] = ()) -> Place:
    """Returns where a run is: the one that has this folder, or that was started with this configuration. Raises NoRunError,
    ConfigError, or OSError of a storage that does not answer."""
    if documents.is_url(run) or Path(run).is_dir():
        return _checked(place_of_run(run, FOR_PEOPLE), run)
    if not Path(run).exists() and Path(run).suffix not in (".yaml", ".yml"):
        raise NoRunError(f"there is no {run}: give a run's folder, its URL, or the YAML file it was started with")
    place = place_of_run(load(run, overrides).run_dir, FOR_PEOPLE)
    if not place.is_dir():
        raise NoRunError(f"{run} was not started yet with this storage and name: there is no {place}")
    return place


def _checked(place: Place, named: str) -> Place:
    copied.check_whole(place)
    if is_run(place):
        return place
    if not place.store.is_local and not place.is_dir():
        raise NoRunError(f"there is no run at {named}: nothing is there")
    raise NoRunError(f"{named} is not a run's folder: expected one with {CHECKPOINTS}/ in it, such as STORAGE/NAME")
