"""Registers the final model of a run in MLflow: a checkpoint as a folder of MLflow, in the run's artifacts, and a version of it.

The export has JAX, and so a process of its own. What it writes lies beside the run's tracking until MLflow has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.agent.child_process import child_env, import_path
from gangway.storage import ours
from gangway.surroundings import end_with_parent
from trainers.checkpoint import layout

EXPORTED = "model"
WORK = ours.named("a model on its way to MLflow", rf"{EXPORTED}(\.(saving|replaced|deleted)-\w[\w-]*)?")
STEP_TAG = "gangway.step"


class RegistrationError(RuntimeError):
    """The model is not registered; `str` says which, and why."""


def register(client: Any, run_id: str, name: str, step: int, checkpoint: str, folder: str) -> str:
    """Makes a version of the registered model `name` of a checkpoint of this run, and returns it, such as `models:/tiny/3`. A
    version that an earlier attempt has made is that version. `checkpoint` is a path or a URL; `folder`, on this machine, has
    room for the model. Raises RegistrationError, OSError, and what MLflow raises."""
    if not layout.named(checkpoint).is_dir():
        raise FileNotFoundError(f"the model of step {step} is not registered as {name}: its checkpoint {checkpoint} is gone")
    if (version := _made_before(client, run_id, name, step)) is None:
        place = f"models/{step}"
        exported = _exported(checkpoint, Path(folder), f"the model of step {step} is not registered as {name}")
        try:
            client.log_artifacts(run_id, str(exported), place)
        finally:
            ours.delete(exported, WORK)
        source = f"{client.get_run(run_id).info.artifact_uri}/{place}"
        version = client.create_model_version(name, source, run_id, tags={STEP_TAG: str(step)}).version
    return f"models:/{name}/{version}"


def _made_before(client: Any, run_id: str, name: str, step: int) -> str | None:
    """Makes the name, if it is new; returns the version that this run has of this step, if there is one."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name = '{name}'")
    return next((v.version for v in versions if v.run_id == run_id and v.tags.get(STEP_TAG) == str(step)), None)


def _exported(checkpoint: str, folder: Path, failed: str) -> Path:
    """Writes the model. Raises RegistrationError, which begins with `failed`."""
    out = folder / EXPORTED
    for left in folder.glob(f"{EXPORTED}*"):  # of an attempt that was killed
        ours.delete(left, WORK)
    paths = import_path(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    ended = subprocess.run(
        [sys.executable, "-m", "trainers.export", checkpoint, str(out), "--format", "mlflow"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=end_with_parent,  # a shipper that is killed leaves no process behind
        env=child_env(os.environ, {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}),
    )
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1].removeprefix("error: ")
        raise RegistrationError(f"{failed}: {last}")
    return out
