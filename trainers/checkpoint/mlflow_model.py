"""A model in the form that `mlflow.pyfunc.load_model` and a model registry of MLflow take: a folder with `MLmodel`, which says
that `trainers.pyfunc` loads what is in the folder `model`. Written without MLflow."""

from __future__ import annotations

import json
import platform
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from gangway.errors import UsageError
from gangway.storage import durable

LOADER = "trainers.pyfunc"
FILE = "MLmodel"
DATA = "model"
TEXTS, LABELS = "texts", "labels"
CLASSIFIER_FILE = "classifier.safetensors"
"""In `model`, of a classifier, which is no model of `transformers`. All else there is a folder of Hugging Face."""
PARAMS: dict[str, tuple[str, Any]] = {
    "max_new_tokens": ("long", 128),
    "temperature": ("double", 0.0),
    "top_k": ("long", 0),
    "top_p": ("double", 1.0),
    "stop": ("string", ""),
    "seed": ("long", 0),
}
"""What `predict(texts, params={...})` of a language model takes: MLflow's type and the default of each."""
OURS = "trainers."


def predicts(task: str) -> str:
    """Returns what the model of a task (`package.module:Class`) predicts from a text: `texts` or `labels`, as the task says
    itself (`predicts`). Raises UsageError if it is neither."""
    from gangway.user_modules import load_object

    # One of a user's own is not imported for this: a model that is no decoder is refused when its weights are written.
    found = getattr(load_object(task), "predicts", None) if task.startswith(OURS) else TEXTS
    if found not in (TEXTS, LABELS):
        raise UsageError(
            f"task = {task!r}: MLflow is given models that predict texts or labels from a text, and this one predicts neither"
        )
    return found


def write_about(folder: Path, *, is_classifier: bool) -> None:
    """Writes `MLmodel` and `requirements.txt` beside the folder `model`. Raises OSError."""
    import yaml

    params = {} if is_classifier else PARAMS
    shown = [{"name": name, "type": kind, "default": default, "shape": None} for name, (kind, default) in params.items()]
    # Without a name: MLflow refuses plain lists for columns with names.
    texts = [{"type": "string", "required": True}]
    about = {
        "flavors": {
            "python_function": {
                "loader_module": LOADER,
                "data": DATA,
                "python_version": platform.python_version(),
            }
        },
        "model_uuid": uuid.uuid4().hex,
        "utc_time_created": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "signature": {
            "inputs": json.dumps(texts),
            "outputs": json.dumps(texts),
            "params": json.dumps(shown) if shown else None,
        },
    }
    durable.write(folder / FILE, yaml.safe_dump(about, sort_keys=False))
    durable.write(folder / "requirements.txt", f"gangway=={_version()}\n")


def _version() -> str:
    try:
        return metadata.version("gangway")
    except metadata.PackageNotFoundError:  # it runs from its sources
        import tomllib

        return str(tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]["version"])
