"""The section `tracking` of the configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gangway.config.masking import MASK, masked
from gangway.config.section import Section, require

MAX_NAME = 250
OWN_STORE = "sqlite:///mlflow.db"
"""The store in the storage of a run, for a process that works there."""


def own_store(run_dir: str) -> str:
    """Returns the URL of the store in the storage of a run, for people and for MLflow's commands, if the path is plain. A run
    that is reached through a link has the store that lies beside the run itself."""
    return f"sqlite:///{os.path.dirname(os.path.realpath(run_dir))}/mlflow.db"


def is_plain(path: str) -> bool:
    """Whether a path means the same as a part of a URL."""
    return not any(letter in path for letter in "%?#")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(Section):
    mlflow: bool = True
    """false: metrics are written to `tracking/metrics.jsonl` only."""
    uri: str | None = field(default=None, repr=False)
    """An MLflow tracking server, or `sqlite:///PATH`. Default: `mlflow.db` in the storage folder, shared by its runs. User
    information in it (`http://user:password@host`) is used, and never shown or stored."""
    experiment: str = "gangway"
    """The experiment of MLflow that the run belongs to."""
    report: bool = True
    """Whether the end of a launch writes `report.html`, a page about the run, into its folder."""

    register_model: str | None = None
    """The name under which the model of a run that has finished is registered in MLflow, where `mlflow.pyfunc.load_model` loads
    it: a new version for each end. Default: no model is registered."""

    def __post_init__(self):
        require(bool(self.experiment.strip()), f"experiment = {self.experiment!r}: expected a name")
        require(
            self.uri is None or "://" in self.uri,
            f"uri = {self._shown()!r}: expected a URL such as http://host:5000 or sqlite:////path/mlflow.db",
        )
        self._check_model()

    def _check_model(self) -> None:
        name = self.register_model
        require(
            name is None or (bool(name.strip()) and not set(name) & set("/:'%") and len(name) <= MAX_NAME),
            f"register_model = {name!r}: expected a name of at most {MAX_NAME} characters, without / : ' %",
        )
        require(
            name is None or self.mlflow,
            f"register_model = {name!r}: mlflow = false keeps no model; set mlflow to true, or leave register_model out",
        )

    def _shown(self) -> str:
        """Without what may be user information, though it is no URL."""
        *user, rest = (self.uri or "").rpartition("@")
        return f"{MASK}@{rest}" if any(user) else rest

    def stored_uri(self) -> str | None:
        """Returns what the documents of a run say of the store: None for the one in the run's own storage."""
        return None if self.uri is None else masked(self.resolved_uri(""))

    def resolved_uri(self, run_dir: str) -> str:
        if self.uri is None:
            return own_store(run_dir)
        if self.uri.startswith("sqlite:///"):
            return f"sqlite:///{os.path.abspath(self.uri.removeprefix('sqlite:///'))}"
        return self.uri
