"""Runs on hosts that are killed, become fewer, and come back."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.multihost import harness
from tests.programs.processes import PATIENCE_S
from tests.strikes import Folder
from trainers.config.arguments import TrainingArguments


def resized(made: TrainingArguments, folder: Path, cut_at: tuple[int, int], **orders: Any) -> list[harness.Host]:
    """Two hosts, one, and two again. Returns the last ones."""
    harness.run(made, folder / "two", hosts=2, devices_per_host=2, stop_at=cut_at[0], **orders)
    harness.run(made, folder / "one", hosts=1, devices_per_host=2, stop_at=cut_at[1])
    return harness.run(made, folder / "again", hosts=2, devices_per_host=2)


def killed_and_resized(made: TrainingArguments, folder: Path, cut_at: tuple[int, int]) -> list[harness.Host]:
    """As `resized`, after a start of two hosts of which one was killed at batch 2: before the checkpoint of step 2 began, or
    after that."""
    faults = Folder(folder / "faults", step_s=0.2)
    faults.order(1, "kill", at=2)
    hosts = harness.start(made, folder / "struck", hosts=2, devices_per_host=2, env=faults.env)
    assert hosts[1].child.wait_gone(PATIENCE_S)
    assert hosts[1].exit.signal == signal.SIGKILL, hosts[1].exit
    harness.kill(hosts)
    return resized(made, folder, cut_at)
