"""The launches of a run in MLflow: one that changes settings is a nested run, with what it changes as parameters.

The run itself has all metrics, over all launches. A launch without changes adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.tracking.spool import State
from trainers.config.arguments import PLACE

KEY_TAG = "gangway.key"
PARENT_TAG, NAME_TAG = "mlflow.parentRunId", "mlflow.runName"
NOT_SET = "(not set)"
NAMED = 3
"""So many of the changed settings are in the name of a nested run."""


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that differ, by their new values; where the run is stored is none of them."""
    names = [name for name in (*now, *(name for name in before if name not in now)) if name.partition(".")[0] not in PLACE]
    return {name: now.get(name, NOT_SET) for name in names if before.get(name) != now.get(name)}


def begin(run: Any, state: State, record: Mapping[str, Any]) -> None:
    """Begins the launch of a line of the spool, once for all its drivers. `run` is the `MlflowRun`. What `state` then says is
    kept with the progress of the shipper: a line that comes twice finds the nested run that it has made."""
    if record["launch"] != state.launch:
        end(run, state, "FAILED", state.last_s or record["t"])  # its end was never told
        changed = changes(state.settings, record["params"]) if state.settings else {}
        if changed:
            state.nested = run.nested(record["launch"], _name(changed), changed, record["t"])
        state.launch, state.settings = record["launch"], dict(record["params"])


def end(run: Any, state: State, status: str, at_s: float) -> None:
    """Ends the nested run of the present launch, if it has one."""
    if state.nested is not None:
        run.end_nested(state.nested, status, at_s)
    state.nested = None


def _name(changed: Mapping[str, str]) -> str:
    shown = [f"{name} = {value[:40]}" for name, value in list(changed.items())[:NAMED]]
    return "resumed: " + ", ".join(shown) + (f", and {len(changed) - NAMED} more" if len(changed) > NAMED else "")
