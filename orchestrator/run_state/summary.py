"""The summary of a run at its end: `summary.json` in its folder, also shown on the console and tracked in MLflow."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from gangway.storage import documents, json_text
from orchestrator.run_state.goodput import share
from orchestrator.run_state.incident_log import KEPT_INCIDENTS
from orchestrator.run_state.launch import Launch
from orchestrator.run_state.stored import SUMMARY_KIND
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, PLACE
from trainers.recorders.dispatch import Recorders

SUMMARY = "summary.json"


PACKAGES = ("gangway", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ray", "mlflow")
"""Those whose versions may change a run."""


def build(
    launch: Launch, status: str, result: dict[str, Any], error: str | None, now_s: float, configuration: Mapping[str, Any]
) -> dict[str, Any]:
    """Builds the summary. `status` is finished, stopped or failed; `result` is the trainer's result (empty if there is none);
    `configuration` is plain data.

    Its numbers are those of the run, over all its launches. Those of this launch are below `launch`.
    """
    trained_on = (result.get("lineage") or [{}])[-1]
    progress = launch.progress
    earlier, seconds, wall_s = progress.earlier, progress.goodput.totals(now_s), progress.goodput.wall_s(now_s)
    began_s = progress.goodput.started_at_s
    incidents = [*progress.earlier_incidents, *((launch.launch_id, incident) for incident in progress.incidents)]
    return {
        "status": status,
        "stop_reason": result.get("stop_reason"),
        "error": error,
        "steps": result.get("steps", progress.high_water_step),
        "tokens": result.get("tokens"),
        "samples": result.get("samples"),
        "train_loss": result.get("train_loss"),
        "train_metrics": result.get("train_metrics"),
        "eval_loss": result.get("eval_loss"),
        "evaluation": result.get("evaluation"),
        "throughput": result.get("throughput"),
        "num_parameters": result.get("num_parameters"),
        "hosts": trained_on.get("num_hosts"),
        "devices": trained_on.get("num_devices"),
        "launches": earlier.launches + 1,
        "generations": earlier.generations + progress.generations,
        "drivers": earlier.drivers + progress.drivers,
        "incidents": [incident.to_dict() | {"launch_id": of} for of, incident in incidents[-KEPT_INCIDENTS:]],
        "num_incidents": earlier.num_incidents + progress.num_incidents,
        "failed_requests": progress.failed_requests,
        "requests": dict(progress.requests),
        "goodput": {name: value + earlier.seconds.get(name, 0.0) for name, value in seconds.items()},
        "wall_s": earlier.wall_s + wall_s,
        "started_at": _time(began_s if earlier.started_at_s is None else earlier.started_at_s),
        "ended_at": _time(now_s),
        "params_digest": result.get("params_digest"),
        "samples_digest": result.get("samples_digest"),
        "lineage": result.get("lineage"),
        "skipped_batches": result.get("skipped_batches"),
        "checkpoint": result.get("checkpoint") or progress.saved_path,
        "sample": result.get("sample"),
        "launch_id": launch.launch_id,
        "launch": {
            "generations": progress.generations,
            "drivers": progress.drivers,
            "num_incidents": progress.num_incidents,
            "goodput": seconds,
            "wall_s": wall_s,
            "started_at": _time(began_s),
        },
        "configuration_digest": json_text.digest_of(configuration),
        "training_digest": training_digest(configuration),
        "versions": versions(),
    }


def training_digest(configuration: Mapping[str, Any]) -> str:
    """Returns a digest of what a configuration (`orchestrator.config.job.shown`) says of the training, wherever it is stored."""
    training = {name: value for name, value in configuration.items() if name not in (*ORCHESTRATOR_SECTIONS, *PLACE)}
    return json_text.digest_of(training)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that are installed here, the driver's machine."""
    found = {"python": sys.version.partition(" ")[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _time(unix_s: float) -> str:
    """Returns the time as text, such as 2026-11-24T01:02:03+00:00."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def write(run_dir: str, summary: dict[str, Any]) -> str:
    path = documents.join(run_dir, SUMMARY)
    SUMMARY_KIND.write_over(path, summary)
    return path


def track(launch: Launch, recorders: Recorders, summary: dict[str, Any]) -> None:
    """Tracks the summary: the goodput ledger and the recoveries as metrics of the last step, in MLflow and by the recorders; the
    whole as a file, in MLflow."""
    step, ledger = summary["steps"] or 0, of_the_end(summary)
    launch.tracker.log_metrics(step, ledger)
    recorders.record(step, ledger)
    # Before it is named to MLflow: the shipper reads the file.
    write(launch.run_dir, summary)
    launch.tracker.log_artifact(documents.join(launch.run_dir, SUMMARY))


def of_the_end(summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of the end of a launch."""
    recoveries = [incident["total_s"] for incident in summary["incidents"] if incident["resumed_step"] is not None]
    seconds = {f"goodput/{category}_s": value for category, value in summary["goodput"].items()}
    of_launch = summary["launch"]
    return {
        **seconds,
        "goodput/share": share(summary["goodput"]),
        "launch/wall_s": of_launch["wall_s"],
        "launch/goodput_share": share(of_launch["goodput"]),
        "incidents/count": summary["num_incidents"],
        "incidents/recovery_s": sum(recoveries),
    }
