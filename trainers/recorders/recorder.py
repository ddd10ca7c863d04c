"""The interface of a recorder: it receives the numbers of a run, once a publish. Free of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gangway.published import Distribution
from gangway.storage import identity


class About(NamedTuple):
    """The run whose numbers are recorded."""

    name: str
    folder: str
    """The run's folder, an absolute path."""
    settings: Mapping[str, Any]
    """The configuration, section by section."""
    output: str | None = None
    """Where the configuration wants this recorder to write (`recorder_folders`); None: where it chooses, below `folder`."""

    def output_folder(self, default: str = "") -> Path:
        """Returns the folder to write in; `default` is below the run's folder."""
        # An absolute `output` takes the place of the run's folder.
        return Path(identity.local_folder(self.folder), default if self.output is None else self.output)


class Recorder(Protocol):
    """Receives the numbers of a run. Built as `Class(about: About)`. One thread of its own calls it, so it may wait. An error
    that it raises is reported, and costs only the numbers of that publish.

    After a restart of the run, steps may come again that were recorded before. Their numbers are the same, except times. A
    recorder that keeps its own file should keep each number once.

    It may have a method `go_back(step)`. That is called when training has gone back to `step` and takes another course from
    there, with other settings or without some batches: what was recorded of later steps is no longer true.
    """

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        """Records the numbers of one publish by name. Those of an evaluation (`eval_...`), and those of the end of a launch
        (`goodput/...`, `launch/...`, `incidents/...`), come separately from those of training."""

    def close(self) -> None:
        """Ends the recording; what was recorded must be complete when this returns."""
