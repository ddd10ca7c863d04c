"""What is left of a run when it ends: `summary.json` in its folder, the same shown on the console and kept as the verdict."""

from __future__ import annotations

from typing import Any

from orchestrator import storage
from orchestrator.launch import Launch

SUMMARY = "summary.json"


def build(launch: Launch, status: str, result: dict[str, Any], error: str | None, now_s: float) -> dict[str, Any]:
    """`status` is finished, stopped or failed; `result` is what the trainer told at its end (empty if it did not get there)."""
    return {
        "status": status,
        "stop_reason": result.get("stop_reason"),
        "error": error,
        "steps": result.get("steps", launch.high_water_step),
        "tokens": result.get("tokens"),
        "samples": result.get("samples"),
        "train_loss": result.get("train_loss"),
        "eval_loss": result.get("eval_loss"),
        "num_parameters": result.get("num_parameters"),
        "generations": launch.generations,
        "drivers": launch.drivers,
        "incidents": [incident.to_dict() for incident in launch.incidents],
        "goodput": launch.goodput.totals(now_s),
        "wall_s": launch.goodput.wall_s(now_s),
        "params_digest": result.get("params_digest"),
        "samples_digest": result.get("samples_digest"),
        "checkpoint": result.get("checkpoint") or launch.saved_path,
        "sample": result.get("sample"),
        "launch_id": launch.launch_id,
    }


def write(run_dir: str, summary: dict[str, Any]) -> str:
    path = storage.join(run_dir, SUMMARY)
    storage.write_json(path, summary)
    return path
