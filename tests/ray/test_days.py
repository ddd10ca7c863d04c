"""The first days of `tests/days` with few steps, in the environment that is there. `make days` runs all of them in a new one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.programs.processes import PATIENCE_S
from tests.unit.orchestrator.deploy.test_scripts import programs

WINGS = ("docs", "orchestrator/commands", "orchestrator/runs", "orchestrator/deploy", "trainers/commands")

STEPS = 40


@pytest.mark.slow("each is a day of a reader: some whole jobs, and the commands around them")
@pytest.mark.parametrize("day", ["night", "own_model", "fine_tune", "cluster"])
def test_the_day_goes_by_the_commands_of_the_documents(day, tmp_path):
    programs(tmp_path / "bin", gangway=f'exec {sys.executable} -m orchestrator.gangway "$@"\n')
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "DAY_STEPS": str(STEPS)}
    with (tmp_path / "printed.log").open("w+") as printed:
        done = subprocess.run(
            ["bash", ROOT / "tests" / "days" / f"{day}.sh"],
            env=env, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        printed.seek(0)
        assert done.returncode == 0, printed.read()
