"""Whole jobs on a Ray that the test has started: the driver in this process, everything else as it always is."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from gangway.storage import documents
from orchestrator.config.job import build
from orchestrator.driver import main
from orchestrator.driver.ray_train import JobFailed
from orchestrator.reporting.board import Board
from orchestrator.run_state.outcome import read_outcome


class NoTrain:
    """Ray Train is not there: what would have been reported."""

    def __init__(self) -> None:
        self.reported: list[tuple[dict[str, Any], str | None]] = []

    def report(self, metrics: dict[str, Any], checkpoint_path: str | None = None) -> None:
        self.reported.append((metrics, checkpoint_path))

    def close(self) -> None: ...


LANGUAGE_MODEL = {
    "task": "trainers.tasks.causal_lm:CausalLMTask",
    "model": {"width": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 64},
    "data": {"paths": [__file__], "sequence_length": 16, "eval_fraction": 0.2},
    "previews": {"num_tokens": 4},
}


def settings(tmp_path, **changes: Any) -> dict[str, Any]:
    """A job of seconds. Its task compiles quickly: a language model is for tests that are about it."""
    return {
        "name": "job",
        "storage": str(tmp_path),
        "global_batch_size": 8,
        "max_num_steps": 6,
        "publish_every_steps": 2,
        "task": "tests.programs.tiny:TableTask",
        "data": {"dataset": "tests.programs.tiny:numbers", "sequence_length": 16},
        "checkpoint": {"save_steps": 3},
        "hosts": {"count": 2},
        "tracking": {"mlflow": False},
        **changes,
    }


def run_job(made: dict[str, Any], board: Board | None = None) -> dict[str, Any]:
    """Its summary, whether it finished or failed."""
    config = build(made)
    message = {
        "config": config,
        "board": board or Board(),
        "launch_id": f"{time.time_ns():x}",
        "run_dir": config.run_dir,
        "started_at_s": time.time(),
    }
    with suppress(JobFailed):
        main.drive(message, NoTrain())
    summary = documents.read_json(documents.join(config.run_dir, "summary.json"))
    assert sum(summary["goodput"].values()) == pytest.approx(summary["wall_s"], rel=1e-3)
    assert read_outcome(config.run_dir, message["launch_id"])["error"] == summary["error"]
    return summary
